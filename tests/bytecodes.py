"""Interrupt a call, or end a process, before a chosen bytecode."""

import sys
from threading import get_ident

import torch


def before_bytecodes(ours, each):
    "Call `each` before every bytecode of this thread in `ours` files; return what ends it"
    if sys.version_info >= (3, 12):
        return _monitor(ours, each)  # there the first call of a function is traced late

    def trace(frame, event, arg):
        if not ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == 'opcode':
            each()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    return lambda: sys.settrace(before)


def _monitor(ours, each):
    mon = sys.monitoring
    thread = get_ident()
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


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(call, at, *files):
    "Raise before bytecode number `at` of this library, or these files; return whether it got there"
    seen = 0

    def each():
        nonlocal seen
        seen += 1
        if seen == at:
            raise Interrupt

    grad = torch.is_grad_enabled()
    end = before_bytecodes(lambda file: any(f in file for f in files or ['fastrl_replay/']), each)
    try:
        call()
    except Interrupt:
        return True
    finally:
        end()
        # a `with` that is cut before the call of its exit stays entered; no signal comes there
        torch.set_grad_enabled(grad)
    return False
