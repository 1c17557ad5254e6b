"""What happens before a bytecode: there a signal may come, or the end of the process."""

import sys
from threading import get_ident


def before_bytecodes(ours, each):
    "Call `each` before every bytecode that this thread executes in a file that is `ours`; returns what ends it"
    if sys.version_info >= (3, 12):
        return _monitor(ours, each)  # there the first call of a function is traced late

    def trace(frame, event, arg):
        if not ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == 'opcode':
            each()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    return lambda: sys.settrace(before)


def _monitor(ours, each):
    mon, thread = sys.monitoring, get_ident()
    tool = next(i for i in range(6) if mon.get_tool(i) is None)
    event = mon.events.INSTRUCTION

    def on(code, offset):
        if not ours(code.co_filename):
            return mon.DISABLE
        if get_ident() == thread:
            each()

    def end():
        mon.set_events(tool, 0)
        mon.free_tool_id(tool)

    mon.use_tool_id(tool, 'bytecodes')
    mon.register_callback(tool, event, on)
    mon.restart_events()
    mon.set_events(tool, event)
    return end
