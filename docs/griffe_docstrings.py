"""What griffe doesn't know of this project's docstrings, for mkdocs.yml.

- `a, b: text` under `Args:` is both arguments, each with that text.
- Under `Args:` of a named tuple are its fields; griffe knows them by `Attributes:`.
- Examples that stand by themselves, without a heading, are code.
- `fzero.optim.adam` is the function: griffe takes the module of that name, as it was there first.

Names that no argument has are warnings as ever, which fail the build.
"""

import re
from typing import Any

import griffe

SEVERAL = re.compile(r"( +)((?:\*{0,2}\w+, )+\*{0,2}\w+): (.*)")
HEADING = re.compile(r"( *)(\w+):")


def split_names(text: str) -> str:
    r"""The docstring with one entry for each argument.

    >>> print(split_names("Sum.\n\nArgs:\n    a, b: two numbers,\n        any.\n    c: a third."))
    Sum.
    <BLANKLINE>
    Args:
        a: two numbers,
            any.
        b: two numbers,
            any.
        c: a third.
    """
    lines, done, indent = text.splitlines(), [], -1
    while lines:
        line = lines.pop(0)
        if heading := HEADING.fullmatch(line):
            indent = len(heading[1]) + 4 if heading[2] == "Args" else -1
        several = SEVERAL.fullmatch(line)
        if several is None or len(several[1]) != indent:
            done.append(line)
            continue
        more = []
        while lines and lines[0].startswith(several[1] + " "):
            more.append(lines.pop(0))
        for name in several[2].split(", "):
            done += [f"{several[1]}{name}: {several[3]}", *more]
    return "\n".join(done)


def fence(text: str) -> str:
    r"""The docstring with a fence around examples that stand outside of a section.

    >>> fence("Double.\n\n>>> 2 * 1\n2").splitlines()
    ['Double.', '', '```pycon', '>>> 2 * 1', '2', '```']
    """
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        f"```pycon\n{part.rstrip()}\n```" if part.startswith(">>> ") else part for part in parts
    )


class Docstrings(griffe.Extension):
    """Before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever griffe has found."""
        if obj.docstring is None:
            return
        text = fence(split_names(obj.docstring.value))
        named_tuple = obj.is_class and any(str(x).endswith("NamedTuple") for x in obj.bases)
        if named_tuple or "__new__" in obj.members:
            text = re.sub(r"^( *)Args:$", r"\1Attributes:", text, flags=re.M)
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        """Put public functions and classes in the place of the modules that bear their name."""
        loader.resolve_aliases(implicit=True, external=False)
        for face in [pkg, *(m for m in pkg.modules.values() if not m.is_alias)]:
            for name in face.exports or ():
                module = face.members.get(str(name))
                if module is not None and not module.is_alias and module.is_module:
                    own = module.members.get(str(name))
                    if own is not None:
                        face.members[str(name)] = griffe.Alias(str(name), own, parent=face)
