"""The package and its tests stay small."""

import ast
import io
import sys
import tokenize

import pytest
from test_house import ROOT

# In tokens: names, operators, numbers and strings without docstrings.
# Lower a number when code was deleted.
MOST = dict(fastrl_replay=170_383, tests=246_517)
KINDS = tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING


def tokens(path):
    "Count the tokens of a module without its docstrings."
    source = path.read_text(encoding='utf-8')
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.add(node.body[0].lineno)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type in KINDS and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in found
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason='an f-string is several tokens there')
@pytest.mark.parametrize('folder', MOST)
def test_number_of_tokens(folder):
    paths = [path for path in (ROOT / folder).rglob('*.py') if path.name != '_modidx.py']
    total = sum(map(tokens, paths))
    remedy = 'A commit that raises the number in tests/test_size.py says why the code is worth it.'
    assert total <= MOST[folder], f'{folder} has {total:,} tokens, not {MOST[folder]:,}. {remedy}'
