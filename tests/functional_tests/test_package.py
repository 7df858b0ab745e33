"""The wheel in fresh environments outside the clone, with the packages that pip would install: its programs run, a
Megatron-LM clone does not replace them, and megatron-core next to them is reported.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron
from megatron.__main__ import COMMANDS
from megatron.tools.quickstart import NUM_LINES
from tests.harness import ROOT

# The vocabulary size is that of the byte tokenizer.
TINY = "--model qwen3-30b-a3b --model-scale tiny --vocab-size 257 --seq-length 32 --micro-batch-size 2 --lr 1e-3"
# A stand-in for NVIDIA's megatron-core: its wheel has no megatron/__init__.py, and files with the same paths as ours.
THEIRS = "megatron_core-0.99.0"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with wheels and the packages that they require, but without the clone."""

    folder: Path

    def run(self, command: str, *, cwd: Path) -> str:
        """Runs a script of the environment with its arguments, and returns stdout."""
        return self.run_words(command.split(), cwd=cwd).stdout

    def run_words(
        self, words: Sequence[str], *, cwd: Path, status: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script of the environment in `cwd`; fails with its output if it ends with another exit status."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done


def pip(*words: str | Path, python: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def required_packages(requirements: Iterable[str]) -> list[metadata.Distribution]:
    """Returns the packages in the environment of the tests that pip would install for these requirements."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    todo = list(map(Requirement, requirements))
    while todo:
        one = todo.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in found:
            continue
        found[key] = metadata.distribution(one.name)
        for further in map(Requirement, found[key].requires or ()):
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                todo.append(further)
    return list(found.values())


def fresh_environment(folder: Path, *wheels: Path, requirements: Iterable[str]) -> Environment:
    """Creates an environment with links to the required packages alone, and installs the wheels in this order."""
    venv.create(folder, symlinks=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in required_packages(requirements):
        names = {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for name in names:
            if not (purelib / name).exists():  # packages may share a folder
                (purelib / name).symlink_to(str(package.locate_file(name)))
    for wheel in wheels:
        pip("install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel, python=folder / "bin" / "python")
    return Environment(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the sources, because a build writes into its source folder."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("configs", "megatron", "tools"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), *map(ROOT.joinpath, ("LICENSE", "README.md", "pyproject.toml"))]:
        shutil.copy(path, source)
    pip(
        *("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source),
        python=Path(sys.executable),
    )
    (built,) = wheels.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment after `pip install .`, without extras."""
    folder = tmp_path_factory.mktemp("fresh") / "env"
    return fresh_environment(folder, wheel, requirements=PROJECT["dependencies"])


@pytest.fixture(scope="module")
def with_extras(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment after `pip install ".[all]"`."""
    extras = PROJECT["optional-dependencies"]
    (chosen,) = extras["all"]
    requirements = [*PROJECT["dependencies"], *(one for name in Requirement(chosen).extras for one in extras[name])]
    return fresh_environment(tmp_path_factory.mktemp("all") / "env", wheel, requirements=requirements)


@pytest.fixture
def their_clone(tmp_path: Path) -> Path:
    """A clone of Megatron-LM, as far as imports see it."""
    folder = tmp_path / "Megatron-LM"
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
        (folder / "megatron" / name / "__init__.py").write_text("raise ImportError('theirs')\n")
    for name in ("gpt_builders", "model_provider", "pretrain_gpt"):
        (folder / f"{name}.py").write_text("raise ImportError('theirs')\n")
    return folder


@pytest.mark.slow
def test_the_wheel_has_one_package_the_modules_of_scripts_and_every_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    metadata = f"megatron_stash-{megatron.__version__}.dist-info"
    assert top == {"megatron", "gpt_builders.py", "model_provider.py", "pretrain_gpt.py", metadata}
    assert {f"megatron/configs/{path.name}" for path in (ROOT / "configs").iterdir()} <= names
    assert "megatron/py.typed" in names
    assert not [name for name in names if name.startswith("megatron/tools/gate")]


@pytest.mark.slow
def test_every_module_of_the_wheel_can_be_imported_outside_the_clone(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from importlib import import_module, metadata\n"
        "for file in metadata.files('megatron-stash'):\n"
        "    if file.suffix == '.py' and 'extensions' not in file.parts:  # those need packages for GPUs\n"
        "        name = '.'.join(file.with_suffix('').parts).removesuffix('.__init__')\n"
        "        try:\n"
        "            print(import_module(name).__file__)\n"
        "        except ModuleNotFoundError as error:\n"
        "            if error.name != 'triton':  # kernels\n"
        "                raise\n"
    )
    files = installed.run("python program.py", cwd=tmp_path).split()
    assert len(files) > 200
    assert [file for file in files if not Path(file).is_relative_to(installed.folder)] == []


@pytest.mark.slow
def test_the_packages_of_extras_are_missing_after_an_installation_without_extras(installed: Environment) -> None:
    """Otherwise the tests of this environment would show nothing."""
    pip("check", python=installed.folder / "bin" / "python")
    # Packages in the order of their extras, but for jinja2, which torch requires.
    names = "datasets pyarrow zstandard plotly tensorboard safetensors sentencepiece tiktoken transformers wandb"
    program = "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    words = ["python", "-c", program, "torch", *names.split()]
    assert installed.run_words(words, cwd=installed.folder).stdout.split() == ["torch"]


@pytest.mark.slow
def test_each_script_has_help_and_a_version_without_extras(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import contextlib, importlib.metadata, io, json, sys\n"
        "def printed(script, flag):\n"
        "    sys.argv = [script.name, flag]\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try:\n"
        "            status = script.load()()\n"
        "        except SystemExit as error:\n"
        "            status = error.code\n"
        "    return status or 0, out.getvalue()\n"
        "for script in importlib.metadata.distribution('megatron-stash').entry_points:\n"
        "    print(json.dumps([script.name, *(printed(script, flag) for flag in ('--help', '--version'))]))\n"
    )
    lines = installed.run("python program.py", cwd=tmp_path).splitlines()
    assert [json.loads(line)[0] for line in lines] == list(PROJECT["scripts"])
    for name, help_of, version_of in map(json.loads, lines):
        assert help_of[0] == 0 and help_of[1].startswith(f"usage: {name} ")
        assert version_of == [0, f"megatron-stash {megatron.__version__}, torch {metadata.version('torch')}\n"]


@pytest.mark.slow
def test_a_missing_extra_is_named_in_one_line(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "texts.parquet").write_bytes(b"PAR1")
    words = ["megatron-preprocess", "--input", "texts.parquet", "--output-prefix", "out", "--tokenizer-type"]
    done = installed.run_words([*words, "ByteLevelTokenizer"], cwd=tmp_path, status=1)
    (line,) = done.stderr.splitlines()
    assert "pip install 'megatron-stash[data]'" in line


@pytest.mark.slow
def test_the_quickstart_trains_and_continues_a_text_without_extras(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from megatron.tools import quickstart\n"
        "quickstart.planned_steps = lambda plan, *, minutes: quickstart.NUM_LINES\n"
        "quickstart.main()\n"
    )
    write_documents(tmp_path / "text.txt")
    printed = installed.run("python program.py --data text.txt --minutes 1 --processes 1", cwd=tmp_path)
    assert "  | " in printed  # generated text
    checkpoints = tmp_path / "runs" / "text" / "checkpoints"
    *_, last = (checkpoints / "steps.jsonl").read_text().splitlines()
    assert json.loads(last)["iteration"] == NUM_LINES


@pytest.mark.slow
def test_programs_are_the_packages_own_in_a_clone_of_megatron_lm(
    installed: Environment, their_clone: Path, tmp_path: Path
) -> None:
    """The clone is the current folder, which `python -m` puts first on sys.path, or is on PYTHONPATH."""
    version = f"megatron-stash {megatron.__version__}, "
    torchrun = "torch.distributed.run --standalone --nproc-per-node 1 -m"
    calls: list[tuple[str, Path, dict[str, str]]] = [
        (f"python -m {torchrun} megatron train --version", their_clone, {}),
        ("python -m megatron plan --version", their_clone, {}),
        ("megatron-train --version", tmp_path, {"PYTHONPATH": str(their_clone)}),
    ]
    for command, cwd, env in calls:
        done = installed.run_words(command.split(), cwd=cwd, env=env)
        assert done.stdout.startswith(version), command
        expected = f"megatron-stash {megatron.__version__} is imported instead of {their_clone / 'megatron'}"
        assert [expected in line for line in done.stderr.splitlines()] == [True], command


def write_documents(path: Path) -> None:
    path.write_text("\n\n".join(f"Document {number} has several words. " * 30 for number in range(40)))


@pytest.mark.slow
def test_installed_programs_work_in_any_folder_without_extras(installed: Environment, tmp_path: Path) -> None:
    """Tokens, training by both entries, generated text, a converted checkpoint and a plan."""
    write_documents(tmp_path / "text.txt")

    def run(command: str) -> str:
        return installed.run(command, cwd=tmp_path)

    tokenizer = "--tokenizer-type ByteLevelTokenizer"
    run(f"megatron-preprocess --input text.txt --output-prefix tokens --append-eod {tokenizer}")
    data = f"{tokenizer} --data-path tokens_text_document --split 9,1,0"
    flags = f"{TINY} {data} --lr-decay-iters 4 --save run --load run"
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node 1 -m megatron train"
    run(f"{torchrun} {flags} --train-iters 1")
    assert "iteration        2/" in run(f"megatron-train {flags} --train-iters 2")
    assert run("megatron-generate --load run --prompt Document --max-new-tokens 4").startswith("Document")
    run("megatron-convert convert --from megatron --to hf --load run --save hub")
    assert (tmp_path / "hub" / "config.json").exists()
    dense = "--model llama3.2-1b --model-scale tiny --mock-data --tokenizer-type NullTokenizer --train-iters 1"
    plan = run(f"megatron-plan {dense} --gpus 1 --global-batch-size 1 --micro-batch-size 1 --top 1")
    assert "1. pretrain_gpt.py --model llama3.2-1b" in plan


@pytest.mark.slow
def test_reports_of_runs_with_and_without_tensorboard_are_written(with_extras: Environment, tmp_path: Path) -> None:
    train = f"megatron-train {TINY} --mock-data --tokenizer-type ByteLevelTokenizer --train-iters 2"
    for log_flags in ("--tensorboard-dir logged", "--save saved"):
        with_extras.run(f"{train} {log_flags}", cwd=tmp_path)
    with_extras.run("megatron-report logged saved --output report.html", cwd=tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_each_command_is_a_script_and_an_entry_of_python_m_megatron() -> None:
    assert PROJECT["scripts"] == {f"megatron-{name}": f"{module}:main" for name, (module, _) in COMMANDS.items()}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--help", []),
        ("", ["error: COMMAND is missing"]),
        ("plna --gpus 8", ["error: there is no command plna; did you mean plan?"]),
        ("xyzzy", ["error: there is no command xyzzy"]),
    ],
)
def test_python_m_megatron_lists_its_commands_and_names_a_wrong_one(words: str, problem: list[str]) -> None:
    command = [sys.executable, "-m", "megatron", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if problem else 0)
    lines = (done.stderr if problem else done.stdout).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
    assert [line for line in lines if line.startswith("error")] == problem == lines[-len(problem) or len(lines) :]


def test_python_m_megatron_prints_the_versions() -> None:
    command = [sys.executable, "-m", "megatron", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"megatron-stash {megatron.__version__}, torch {metadata.version('torch')}\n"


def imported(*path: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Returns the lines that a script with the line `import megatron` writes to stderr. path: of PYTHONPATH."""
    (path[-1] / "script.py").write_text("import megatron\n")
    done = subprocess.run(
        [sys.executable, str(path[-1] / "script.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (f"{THEIRS}.dist-info", "megatron-core 0.99.0"),
        (f"{THEIRS}-py3.11.egg-info", "megatron-core 0.99.0"),
        ("megatron_core.egg-info", "megatron-core"),
        ("megatron-core.egg-link", "megatron-core"),
    ],
)
def test_megatron_core_in_the_same_environment_is_reported_in_one_line(tmp_path: Path, entry: str, named: str) -> None:
    assert imported(ROOT, tmp_path) == []
    (tmp_path / entry).touch()
    reported = f"WARNING: megatron-stash {megatron.__version__} and NVIDIA's {named} are both installed, and both"
    (line,) = imported(ROOT, tmp_path)
    assert line.startswith(reported)
    # One line a machine.
    assert imported(ROOT, tmp_path, env={"LOCAL_RANK": "1"}) == []


def test_a_clone_of_megatron_lm_on_the_path_is_reported_in_one_line(their_clone: Path, tmp_path: Path) -> None:
    expected = f"WARNING: megatron-stash {megatron.__version__} is imported instead of {their_clone / 'megatron'}"
    assert [line.startswith(expected) for line in imported(their_clone, ROOT, tmp_path)] == [True]
    assert [line.startswith(expected) for line in imported(ROOT, tmp_path, their_clone)] == [True]
    # Another copy of this package is no clone of Megatron-LM.
    (their_clone / "megatron" / "__init__.py").touch()
    (their_clone / "megatron" / "__main__.py").touch()
    assert imported(ROOT, tmp_path, their_clone) == []


def test_the_page_has_the_lines_that_are_printed(their_clone: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (clone,) = imported(ROOT, tmp_path, their_clone)
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    (installed,) = imported(ROOT, tmp_path)
    assert f"```\n{installed}\n```" in page
    assert f"```\n{clone.replace(str(tmp_path), '/home/you')}\n```" in page


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_either_order_of_installation_is_reported(wheel: Path, tmp_path: Path, order: str) -> None:
    """The later installation replaces megatron/core/__init__.py, so the report is in a file that only our wheel has."""
    theirs = tmp_path / f"{THEIRS}-py3-none-any.whl"
    with zipfile.ZipFile(theirs, "w") as archive:
        archive.writestr("megatron/core/__init__.py", "THEIRS = True\n")
        archive.writestr(
            f"{THEIRS}.dist-info/METADATA", "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.99.0\n"
        )
        archive.writestr(f"{THEIRS}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{THEIRS}.dist-info/RECORD", "")
    wheels = [wheel, theirs] if order == "ours first" else [theirs, wheel]
    both = fresh_environment(tmp_path / "both", *wheels, requirements=PROJECT["dependencies"])
    program = "import megatron.core; print(hasattr(megatron.core, 'THEIRS'))"
    done = both.run_words(["python", "-c", program], cwd=tmp_path)
    assert done.stdout.split() == [str(order == "ours first")]
    assert ["megatron-core 0.99.0" in line for line in done.stderr.splitlines()] == [True]
    # The way of docs/install.md: an environment for each.
    apart = fresh_environment(tmp_path / "theirs", theirs, requirements=[])
    assert apart.run_words(["python", "-c", program], cwd=tmp_path).stdout.split() == ["True"]


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == megatron.__version__
    assert f"## {megatron.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
