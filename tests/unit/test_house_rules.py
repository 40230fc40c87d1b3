"""Rules of the code base that a machine can check; each test lists every place that breaks its
rule.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "delta_belief_rl"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MIN_ANNOTATED = 0.95
BROAD_EXCEPT_ALLOWED = {"cluster/supervisor.py", "obs/wandb_mirror.py"}

# A room may import rooms of its own level and of lower ones.
LEVELS = {
    "types": 0,
    "config": 1,
    **dict.fromkeys(("text", "envs", "algo", "models", "belief.shaping"), 2),
    **dict.fromkeys(("engines", "judge", "belief", "rollout"), 3),
    **dict.fromkeys(("trainer", "eval", "obs"), 4),
    "cluster": 5,
    "cli": 6,
}
# A heavy dependency has one place; a trailing slash stands for a whole room.
OWNERS = {
    "ray": "cluster/",
    "vllm": "engines/vllm_engine.py",
    "wandb": "obs/wandb_mirror.py",
    "huggingface_hub": "cli/hub.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def own_python_files() -> list[Path]:
    """Python files of the repository, tests left out."""
    scripts = [*ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    return package_files() + sorted([*scripts, *(ROOT / "benchmarks").rglob("*.py")])


def text_files() -> list[Path]:
    """Everything that a machine runs: Python, shell, make."""
    found = [*own_python_files(), ROOT / "Makefile", ROOT / ".ci" / "run"]
    found += [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__).resolve()]
    for folder in (ROOT, ROOT / "scripts", ROOT / "validation"):
        pattern = "*.sh" if folder == ROOT else "**/*.sh"
        found += folder.glob(pattern)
    return sorted({path for path in found if path.is_file()})


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function):
            yield node


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every imported module, those imported by ``import_module`` included."""
    package = (".".join(path.relative_to(ROOT).with_suffix("").parts)).rsplit(".", 1)[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            # "from package import room" names the room in the alias.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name == "import_module" or getattr(node.func, "id", "") == "import_module":
                yield node.lineno, str(node.args[0].value)


def level_of(module: str) -> int:
    """Level of a dotted name inside the package, ``belief.shaping`` before ``belief``."""
    parts = module.split(".")
    return LEVELS.get(".".join(parts[:2]), LEVELS.get(parts[0], 0))


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {getattr(kind, "id", getattr(kind, "attr", None)) for kind in kinds}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def is_annotated(function: Function) -> bool:
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    extra = [x for x in (a.vararg, a.kwarg) if x]
    typed = all(x.annotation for x in [*named, *extra] if x.arg not in ("self", "cls"))
    return typed and function.returns is not None


def test_the_rules_see_the_code_they_are_about() -> None:
    assert len(package_files()) > 20
    assert sum(1 for path in package_files() for _ in functions(path)) > 50


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in own_python_files()}
    assert [where(path, n) for path, n in lengths.items() if n > MAX_FILE_LINES] == []


def test_no_function_is_longer_than_the_limit() -> None:
    long = [
        where(path, f.lineno)
        for path in own_python_files()
        for f in functions(path)
        if (f.end_lineno or f.lineno) - f.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_public_function_is_annotated_and_nearly_all_others() -> None:
    every = [(path, f) for path in package_files() for f in functions(path)]
    bare = [(path, f) for path, f in every if not is_annotated(f)]
    assert [where(path, f.lineno) for path, f in bare if not f.name.startswith("_")] == []
    assert 1 - len(bare) / len(every) >= MIN_ANNOTATED


def test_broad_except_stands_only_where_nothing_may_pass() -> None:
    broad = [
        where(path, node.lineno)
        for path in own_python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and is_broad(node)
        and path.relative_to(ROOT).as_posix().removeprefix("delta_belief_rl/")
        not in BROAD_EXCEPT_ALLOWED
    ]
    assert broad == []


def test_every_room_has_a_level() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms - LEVELS.keys() == set()


def test_rooms_import_only_their_own_level_and_lower_ones() -> None:
    wrong = []
    for path in package_files():
        own = level_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        for line, name in imports(path):
            if not name.startswith("delta_belief_rl."):
                continue
            target = name.removeprefix("delta_belief_rl.")
            if level_of(target) > own:
                wrong.append(f"{where(path, line)} imports {target}")
    assert wrong == []


def test_algorithms_know_nothing_of_config_processes_or_files() -> None:
    forbidden = ("delta_belief_rl.config", "ray", "omegaconf", "hydra", "pathlib", "subprocess")
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in [*sorted((PACKAGE / "algo").rglob("*.py")), PACKAGE / "types.py"]
        for line, name in imports(path)
        if name.startswith(tuple(f"{f}." for f in forbidden)) or name in forbidden
    ]
    assert wrong == []


def test_credit_and_shapers_need_no_torch() -> None:
    wrong = [
        where(path, line)
        for room in ("credit", "shapers")
        for path in sorted((PACKAGE / "algo" / room).rglob("*.py"))
        for line, name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_heavy_dependencies_have_one_place_each() -> None:
    wrong = []
    for path in own_python_files():
        place = path.relative_to(ROOT).as_posix().removeprefix("delta_belief_rl/")
        for line, name in imports(path):
            owner = OWNERS.get(name.split(".")[0])
            if owner and not (place.startswith(owner) if owner.endswith("/") else place == owner):
                wrong.append(f"{where(path, line)} imports {name}")
    assert wrong == []


def test_config_imports_without_torch_ray_or_engines() -> None:
    script = """
import importlib, pkgutil, sys
import delta_belief_rl.config as config
for module in pkgutil.walk_packages(config.__path__, "delta_belief_rl.config."):
    importlib.import_module(module.name)
print([n for n in ("torch", "ray", "vllm", "transformers", "wandb") if n in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_H5_F5_nothing_kills_by_name_prints_its_environment_or_uses_alarms() -> None:
    bad = re.compile(
        r"\bpkill\b|\bkillall\b|\bpgrep\b|\bset -[a-zA-Z]*x|\bset -o xtrace|\bbash -[a-z]*x\b"
        r"|signal\.alarm|signal\.setitimer"
    )
    wrong = [
        where(path, number)
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if bad.search(line)
    ]
    assert wrong == []


def test_H8_nothing_forks() -> None:
    # A server that forks before it has threads ("forkserver") is no such fork.
    method = r"(set_start_method\(|get_context\(|context[\"']?\s*[=:])\s*[\"']fork[\"']"
    bad = re.compile(rf"{method}|os\.fork\(")
    wrong = [
        where(path, number)
        for path in own_python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if bad.search(line)
    ]
    assert wrong == []


def test_J6_signals_are_handled_in_one_file_that_the_driver_calls() -> None:
    """Handlers and alarms work in a main thread only, and a worker's calls run in others."""
    # A program of its own that gives signals their defaults back before it becomes another one.
    allowed = {"obs/exits.py", "cli/leash.py"}
    wrong = []
    for path in package_files():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(PACKAGE).as_posix()
        if re.search(r"signal\.(signal|alarm|setitimer)\(", text) and name not in allowed:
            wrong.append(name)
    assert wrong == []
