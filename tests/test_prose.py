"""Holds what readers of jmat's code rely on: docstrings that begin with a verb, and
signatures that say their types.
"""

import ast
import pathlib
import re

JMAT = pathlib.Path(__file__).parents[1] / "jmat"
FILES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(JMAT.glob("**/*.py"))}
# Plurals with which a sentence may begin that has no verb there.
NOUNS = set(
    """
    Blocks Bytes Columns Documents Eigenvectors Examples Inputs Layers Maps Means Metrics Numbers Outputs
    Parameters Parts Predictions Queries Radians Results Rows Seconds Sentences Sites Steps Streams Sums Tensors Texts
    This Tokens Values Weights
    """.split()
)


def definitions(kinds, *, private=True):
    """Yields each function or class of jmat with its place; methods of private classes
    are private, too.
    """

    def inside(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                if child.name.startswith("_") and not private:
                    continue
                if isinstance(child, kinds):
                    yield child
            yield from inside(child)

    for path, tree in FILES.items():
        for node in inside(tree):
            yield f"{path.relative_to(JMAT.parent)}:{node.lineno} {node.name}", node


def test_docstrings_begin_with_a_verb():
    wrong = []
    for place, node in definitions(ast.FunctionDef | ast.ClassDef):
        text = ast.get_docstring(node)
        first = text.split()[0].rstrip(",;:") if text else "Is"
        if not re.fullmatch(r"[A-Z][a-z-]*s", first) or first in NOUNS:
            wrong.append(f"{place}: {text.splitlines()[0]}")
    assert wrong == []


def test_public_signatures_do_not_say_any():
    wrong = []
    for place, node in definitions(ast.FunctionDef, private=False):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [each.annotation for each in arguments if each.annotation] + [
            node.returns or ast.Constant(None)
        ]
        names = {
            inner.id
            for each in annotations
            for inner in ast.walk(each)
            if isinstance(inner, ast.Name)
        }
        wrong += [place] if "Any" in names else []
    assert wrong == []
