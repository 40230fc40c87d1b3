"""From a composed tree to the typed configuration, and back.

Every wrong name or type is one sentence; nothing is coerced that would change what the user
wrote, except an integer where a float or a string is asked, a whole float where an integer is
asked, and a single value where a list is asked.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from delta_belief_rl.config.reference_keys import find_inert
from delta_belief_rl.config.reference_names import REFERENCE_NAMES
from delta_belief_rl.config.schema import RunConfig, leaves, lookup
from delta_belief_rl.types import UserError

D = TypeVar("D")
KNOWN_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys([*(name for name, _, _ in leaves(RunConfig)), *REFERENCE_NAMES])
)


def to_config(tree: DictConfig | Mapping[str, object]) -> RunConfig:
    """The typed configuration of a composed tree; warnings are dropped, see ``convert``."""
    return convert(tree)[0]


def convert(tree: DictConfig | Mapping[str, object]) -> tuple[RunConfig, list[str]]:
    """Build the configuration and say which settings have no effect.

    Raises:
        UserError: An unknown name, a wrong type, a bad interpolation, or an inert setting whose
        value would
            mean another experiment.
    """
    plain = _plain(tree)
    left: dict[str, object] = {}
    config = _build(RunConfig, plain, "", left)
    return config, _judge_inert(config, left)


def nearest(name: str, known: Sequence[str] = KNOWN_NAMES) -> str:
    """The known name that a reader most likely meant; empty when none is close.

    A name whose last part exists elsewhere is taken for a misplaced one, any other for a misspelt
    one.
    """
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    close = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.3)
    if not close:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else ""


def unknown_name(name: str) -> UserError:
    """The error for a setting that nobody knows."""
    guess = nearest(name)
    hint = f"; did you mean {guess}?" if guess else "; docs/config.md lists all settings."
    return UserError(f"There is no setting {name}{hint}")


def to_plain(value: object) -> Any:
    """Dataclasses to dicts and tuples to lists, ready for YAML or JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return {str(key): to_plain(inner) for key, inner in mapping.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in cast("Sequence[object]", value)]
    return value


def _plain(tree: DictConfig | Mapping[str, object]) -> dict[str, object]:
    if not isinstance(tree, DictConfig):
        return dict(tree)
    try:
        container = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = f" (at {error.full_key})" if error.full_key else ""
        raise UserError(
            f"The configuration cannot be resolved{where}: {one_line(error)}"
        ) from error
    return cast("dict[str, object]", container)


def one_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return str(error).strip().split("\n", 1)[0]


def _build(cls: type[D], tree: Mapping[str, object], prefix: str, left: dict[str, object]) -> D:
    """Fill one dataclass; names that it does not have go to ``left`` under their dotted names."""
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in hints:
            _flatten(name, value, left)
            continue
        kind = hints[key]
        if isinstance(kind, type) and is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} is a group of settings and cannot be set to {value!r}.")
            inner = cast("Mapping[str, object]", value)
            values[key] = _build(kind, inner, f"{name}.", left)
        else:
            values[key] = _value(name, kind, value)
    return cls(**values)


def _flatten(name: str, value: object, out: dict[str, object]) -> None:
    if isinstance(value, Mapping) and value:
        for key, inner in cast("Mapping[object, object]", value).items():
            _flatten(f"{name}.{key}", inner, out)
    else:
        out[name] = value


def _judge_inert(config: RunConfig, left: Mapping[str, object]) -> list[str]:
    """One warning for each entry of the inert table that was set to something it does not do."""
    warnings: dict[str, str] = {}
    for name, value in left.items():
        found = find_inert(name)
        if found is None:
            raise unknown_name(name)
        head, entry = found
        if entry.follows:
            agrees = value == lookup(config, entry.follows)
        else:
            agrees = value in entry.holds or (value == {} and name != head)
        if agrees:
            continue
        if entry.strict:
            raise UserError(f"{name}={value} is not possible here: {entry.note}.")
        what = f"{head}.* settings have" if head != name else f"{name} has"
        warnings.setdefault(head, f"{what} no effect: {entry.note}.")
    return list(warnings.values())


def _value(name: str, kind: Any, value: object) -> object:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(name, args, value)
    if origin is Literal:
        return _choice(name, args, value)
    if origin is tuple:
        return _tuple(name, args, value)
    if isinstance(kind, type) and is_dataclass(kind):
        return _item(name, cast("type[object]", kind), value)
    if origin is Mapping:
        return _mapping(name, value)
    if kind in (bool, int, float, str):
        return _scalar(name, kind, value)
    raise _wrong(name, kind, value)


def _mapping(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a group of settings, not {value!r}.")
    return dict(cast("Mapping[str, object]", value))


def _union(name: str, args: tuple[Any, ...], value: object) -> object:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    if isinstance(value, list) and len(choices) > 1:
        choices = [arg for arg in choices if get_origin(arg) is tuple]
    return _value(name, choices[0], cast("object", value))


def _choice(name: str, choices: tuple[object, ...], value: object) -> object:
    if isinstance(value, bool):  # YAML reads an unquoted yes, no, on or off as a truth value
        words = ("yes", "on") if value else ("no", "off")
        value = next((word for word in words if word in choices), words[0])
    if value in choices:
        return value
    close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise UserError(
        f"{name} must be one of {', '.join(str(c) for c in choices)}, not {value!r}{hint}"
    )


def _tuple(name: str, args: tuple[Any, ...], value: object) -> object:
    items: list[object] = [value]
    if isinstance(value, list | tuple):
        items = list(cast("Sequence[object]", value))
    if args[-1] is Ellipsis:
        if value is None:
            return ()
        return tuple(_value(f"{name}[{i}]", args[0], item) for i, item in enumerate(items))
    if len(items) != len(args):
        raise UserError(f"{name} must be a list of {len(args)} values, not {value!r}.")
    return tuple(
        _value(f"{name}[{i}]", kind, item)
        for i, (kind, item) in enumerate(zip(args, items, strict=True))
    )


def _item(name: str, kind: type[D], value: object) -> D:
    """A dataclass inside a list: it has no inert names."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a group such as {{name: ..., r: ...}}, not {value!r}.")
    left: dict[str, object] = {}
    built = _build(kind, cast("Mapping[str, object]", value), f"{name}.", left)
    if left:
        wrong = next(iter(left))
        known = [f"{name}.{leaf}" for leaf in get_type_hints(kind)]
        guess = nearest(wrong, known) or ", ".join(known)
        raise UserError(f"There is no setting {wrong}; did you mean {guess}?")
    return built


def _scalar(name: str, kind: type, value: object) -> object:
    if kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, not {value}.")
        if kind is float:
            return float(value)
        if float(value).is_integer():
            return int(value)
    raise _wrong(name, kind, value)


def _wrong(name: str, kind: Any, value: object) -> UserError:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    wanted = words.get(kind, "a group of settings")
    shown = "null" if value is None else repr(value)
    return UserError(f"{name} must be {wanted}, not {shown}.")
