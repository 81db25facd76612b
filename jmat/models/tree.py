"""Shows the parts of a model as a tree, with shapes and numbers of parameters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax import nnx

from jmat.models.family import Transformer, check_model
from jmat.models.sites import SUBMODULES

# Parts and parameters in the order of `jmat.sites`; others come after these.
_ORDER = (
    *SUBMODULES,
    "tokens",
    "positions",
    "types",
    "project",
    "dense",
    "norm",
    "q",
    "k",
    "v",
    "o",
    "q_norm",
    "k_norm",
    "gate",
    "up",
    "down",
    "out",
    "table",
    "kernel",
    "scale",
    "bias",
)


class _Part(NamedTuple):
    """Holds a line of the tree, and the parts below it."""

    name: str
    words: str  # its own parameters, by name and shape
    size: int  # parameters, those of the parts below included
    parts: tuple["_Part", ...] = ()
    blocks: int = 1  # how many of them the line stands for


def tree(model: Transformer) -> str:
    """Returns the parts of a model as a tree, a line a part: its parameters, their
    shapes and number.

    Parts that are sites have the names of their sites: `attn` below `block.0 … block.7`
    is `block.0.attn`, and so on. Neighbouring blocks of one shape share a line. A tied
    head has no table of its own, which its line says.

    Args:
      model: as `jmat.load` returns it.

    Raises:
      ValueError: it is no model.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> print(jmat.tree(model).splitlines()[0])
      gpt2-docs: 4,364,160 parameters, float32
    """
    check_model(model)
    parts = [
        _part("embed", model.embed),
        *_blocks(model),
        _part("final_norm", model.final_norm),
        _head(model),
    ]
    lines = list(_lines(parts))
    wide, words, size = (max(len(line[k]) for line in lines) for k in range(3))
    total = sum(part.blocks * part.size for part in parts)
    title = f"{model.name or 'Transformer'}: {total:,} parameters, {model.embed.tokens.table.dtype}"
    return "\n".join([title, *(f"{a:{wide}}  {b:{words}}  {c:>{size}}" for a, b, c in lines)])


def _part(name: str, module: nnx.Module, words: Sequence[str] = ()) -> _Part:
    """Returns the line of a module, with those of the modules in it."""
    own = sorted(vars(module).items(), key=lambda item: _place(item[0]))
    arrays = {key: value.get_raw_value() for key, value in own if isinstance(value, nnx.Variable)}
    parts = tuple(_part(key, value) for key, value in own if isinstance(value, nnx.Module))
    shapes = [f"{key} {' × '.join(f'{n:,}' for n in array.shape)}" for key, array in arrays.items()]
    size = sum(array.size for array in arrays.values()) + sum(part.size for part in parts)
    return _Part(
        name, ", ".join([*shapes, *words]) or ("" if parts else "no parameters"), size, parts
    )


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _blocks(model: Transformer) -> Iterator[_Part]:
    """Yields a line for each stretch of blocks with parameters of the same shapes."""
    alike: list[tuple[int, _Part]] = []
    for number, block in enumerate(model.blocks):
        part = _part("", block)
        if alike and alike[-1][1] != part:
            yield _stretch(alike)
            alike = []
        alike.append((number, part))
    if alike:
        yield _stretch(alike)


def _stretch(alike: Sequence[tuple[int, _Part]]) -> _Part:
    (first, part), (last, _) = alike[0], alike[-1]
    name = f"block.{first}" + (f" … block.{last}" if last > first else "")
    return part._replace(name=name, blocks=len(alike))


def _head(model: Transformer) -> _Part:
    if model.head is None:
        return _Part("logits", "no language-model head", 0)
    return _part("logits", model.head, ["table of embed.tokens"] if model.config.tied_head else [])


def _lines(parts: Sequence[_Part], before: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the columns of the lines of parts: name, parameters, and their number."""
    for number, part in enumerate(parts, start=1):
        is_last = number == len(parts)
        count = f"{part.blocks} × " if part.blocks > 1 else ""
        yield f"{before}{'└' if is_last else '├'} {part.name}", part.words, f"{count}{part.size:,}"
        yield from _lines(part.parts, before + ("  " if is_last else "│ "))
