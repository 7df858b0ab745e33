"""The wheel in a fresh environment outside the clone: its programs run, and megatron-core next to it is reported."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

import megatron
from megatron.__main__ import COMMANDS
from tests.harness import ROOT

# As many ids as the tokenizer of bytes has.
TINY = "--model qwen3-30b-a3b --model-scale tiny --vocab-size 257 --seq-length 32 --micro-batch-size 2 --lr 1e-3"
# A wheel of NVIDIA's megatron-core, as far as imports see it: no megatron/__init__.py, and files of the same paths.
THEIRS = "megatron_core-0.99.0"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel, and with the packages of the one that runs the tests, but not the clone."""

    folder: Path

    def run(self, command: str, *, cwd: Path) -> str:
        """Runs a script of the environment and its words; returns stdout."""
        return self.run_words(command.split(), cwd=cwd).stdout

    def run_words(self, words: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a script of the environment in `cwd`; fails with its output if the exit status is not 0."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done


def pip(*words: str | Path, python: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def fresh_environment(folder: Path, *wheels: Path) -> Environment:
    """Creates an environment and installs the wheels in this order."""
    venv.create(folder, symlinks=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A folder named in a .pth file is a place of modules alone: the clone's own .pth file in it is not read.
    (purelib / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    for wheel in wheels:
        pip("install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel, python=folder / "bin" / "python")
    return Environment(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, because a build writes into its source."""
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
    return fresh_environment(tmp_path_factory.mktemp("fresh") / "env", wheel)


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
        "        print(import_module(name).__file__)\n"
    )
    files = installed.run("python program.py", cwd=tmp_path).split()
    assert len(files) > 200
    assert [file for file in files if not Path(file).is_relative_to(installed.folder)] == []


@pytest.mark.slow
def test_installed_programs_work_in_any_folder(installed: Environment, tmp_path: Path) -> None:
    """Tokens, training by both entries, generated text, a Hugging Face folder, a report and a plan."""
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"Document {number} has several words. " * 30 for number in range(40))
    )

    def run(command: str) -> str:
        return installed.run(command, cwd=tmp_path)

    tokenizer = "--tokenizer-type ByteLevelTokenizer"
    run(f"megatron-preprocess --input text.txt --output-prefix tokens --append-eod {tokenizer}")
    data = f"{tokenizer} --data-path tokens_text_document --split 9,1,0"
    flags = f"{TINY} {data} --lr-decay-iters 4 --save run --load run"
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node 1 -m megatron train"
    run(f"{torchrun} {flags} --train-iters 1")
    assert "iteration        2/" in run(f"megatron-train {flags} --train-iters 2 --tensorboard-dir run")
    assert run("megatron-generate --load run --prompt Document --max-new-tokens 4").startswith("Document")
    run("megatron-convert convert --from megatron --to hf --load run --save hub")
    assert (tmp_path / "hub" / "config.json").exists()
    run("megatron-report run --output report.html")
    assert (tmp_path / "report.html").stat().st_size > 100_000
    dense = "--model llama3.2-1b --model-scale tiny --mock-data --tokenizer-type NullTokenizer --train-iters 1"
    plan = run(f"megatron-plan {dense} --gpus 1 --global-batch-size 1 --micro-batch-size 1 --top 1")
    assert "1. pretrain_gpt.py --model llama3.2-1b" in plan


def test_each_command_is_a_script_and_an_entry_of_python_m_megatron() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {f"megatron-{name}": f"{module}:main" for name, (module, _) in COMMANDS.items()}


@pytest.mark.parametrize(("words", "status"), [("--help", 0), ("", 2), ("trian --lr 1", 2)])
def test_python_m_megatron_lists_its_commands(words: str, status: int) -> None:
    command = [sys.executable, "-m", "megatron", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status
    printed = done.stderr if status else done.stdout
    assert [line.split()[0] for line in printed.splitlines()[2:]] == list(COMMANDS)


def imported(python: str, *path: Path, env: dict[str, str] | None = None) -> list[str]:
    """Returns what `import megatron` writes to stderr, without the line of code that warnings quote."""
    places = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [python, "-c", "import megatron"], env={**os.environ, **places, **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_megatron_core_in_the_same_environment_is_reported_in_one_line(tmp_path: Path) -> None:
    assert imported(sys.executable, ROOT) == []
    (tmp_path / f"{THEIRS}.dist-info").mkdir()
    (line,) = imported(sys.executable, ROOT, tmp_path)
    assert f"megatron-stash {megatron.__version__} and NVIDIA's megatron-core 0.99.0 are both installed" in line
    # One line a machine.
    assert imported(sys.executable, ROOT, tmp_path, env={"LOCAL_RANK": "1"}) == []


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_either_order_of_installation_is_reported(wheel: Path, tmp_path: Path, order: str) -> None:
    """Whichever is installed last replaces megatron/core/__init__.py; the report is in a file that is only ours."""
    theirs = tmp_path / f"{THEIRS}-py3-none-any.whl"
    with zipfile.ZipFile(theirs, "w") as archive:
        archive.writestr("megatron/core/__init__.py", "THEIRS = True\n")
        archive.writestr(
            f"{THEIRS}.dist-info/METADATA", "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.99.0\n"
        )
        archive.writestr(f"{THEIRS}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{THEIRS}.dist-info/RECORD", "")
    wheels = [wheel, theirs] if order == "ours first" else [theirs, wheel]
    both = fresh_environment(tmp_path / "both", *wheels)
    program = "import megatron.core; print(hasattr(megatron.core, 'THEIRS'))"
    done = both.run_words(["python", "-c", program], cwd=tmp_path)
    assert done.stdout.split() == [str(order == "ours first")]
    assert len([line for line in done.stderr.splitlines() if "megatron-core 0.99.0" in line]) == 1
    # The way of docs/install.md: an environment for each.
    apart = fresh_environment(tmp_path / "theirs", theirs)
    assert apart.run_words(["python", "-c", program], cwd=tmp_path).stdout.split() == ["True"]


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == megatron.__version__
    assert f"## {megatron.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
