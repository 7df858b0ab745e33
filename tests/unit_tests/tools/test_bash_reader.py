"""Follows bash scripts. The expected commands are those that bash itself runs, from the script and its translation."""

from pathlib import Path

import pytest

from megatron.tools.bash_reader import ScriptError
from megatron.tools.launch_scripts import read_script
from tests.counts import long_count
from tests.unit_tests.tools.bash_oracle import drawn_script, recorded, translated

SCRIPTS = Path(__file__).with_name("bash_scripts.txt").read_text(encoding="utf-8").rstrip("\n").split("\n===\n")


def _recorded_translations(script: str) -> list[str]:
    return [word for launch in read_script(script, {}, name="s.sh").launches for word in recorded(translated(launch))]


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_translation_runs_the_commands_of_its_script(script: str) -> None:
    assert _recorded_translations(script) == recorded(script) != []
    assert all(launch.doubts == () for launch in read_script(script, {}, name="s.sh").launches)


@pytest.mark.parametrize("part", range(4))
def test_a_drawn_script_is_translated_or_named_and_never_another_command(part: int) -> None:
    """The property: no doubt and no refusal, or the same commands."""
    count = long_count(20, soak=500)
    followed = 0
    for seed in range(part * count, (part + 1) * count):
        script = drawn_script(seed)
        try:
            launches = read_script(script, {}, name="s.sh").launches
            translations = [word for launch in launches for word in recorded(translated(launch))]
        except ScriptError as error:
            assert "not followed" in str(error) or "precedes" in str(error) or recorded(script) == [], script
            continue
        if not any(launch.doubts for launch in launches):
            assert translations == recorded(script), f"{seed}:\n{script}"
            followed += 1
    assert followed > count / 2


TRAIN = "torchrun pretrain_gpt.py --s"


@pytest.mark.parametrize(
    ("script", "doubt"),
    [
        (f'srun -l bash -c "{TRAIN} $SLURM_PROCID"', "line 1: SLURM_PROCID is read before srun runs"),
        (f"\nIFS=,; A=1,2; {TRAIN} $A", "line 2: IFS is not followed"),
        (f"IFS=, read -r a b <<< 1,2; {TRAIN} $a", "line 1: read is not followed"),
        (f"declare -A M\nM[a]=1; {TRAIN} ${{M[a]}}", "line 1: declare -A M is not followed"),
        (f"source env.sh; {TRAIN} 1", "line 1: source is not followed: env.sh"),
        (
            f"f() {{ echo a; }}; X=$(f); {TRAIN} $X",
            "line 1: the value of X is not followed: the output of the function f",
        ),
        (f"printf -v A %02d 3; {TRAIN} $A", "line 1: printf is not followed"),
        (f"readonly A=1; A=2; {TRAIN} $A", "line 1: A is not followed: it is read-only"),
        (
            f"if grep -q x list; then A=1; fi; {TRAIN} $A",
            "line 1: the condition 'grep -q x list' is assumed to be false",
        ),
        (f"grep -q x list && A=1; {TRAIN} $A", "line 1: grep is assumed to succeed"),
        (f'{TRAIN} "${{BASH_SOURCE[0]}}"', 'line 1: "${BASH_SOURCE[0]}": BASH_SOURCE is not known'),
        (f"case $(uname) in Linux) A=1;; esac; {TRAIN} $A", "line 1: the case of $(uname) is assumed to match nothing"),
        (f"A=(1 2); unset 'A[0]'; {TRAIN} ${{A[@]}}", "line 1: unset A[0] is not followed"),
        (f"for f in *.json; do A+=$f; done; {TRAIN} $A", "line 1: the loop over f is not followed: names of files"),
        (f"set -- $UN a; shift; {TRAIN} $1", "line 1: shift is not followed: the number of words in UN is not known"),
        (f"{TRAIN} $A; A=1; export A; {TRAIN} $A", ""),
        (f"L[-1]=a; {TRAIN} $B", "line 1: L[-1] is not followed: there is no such element"),
        (f"B=$A; export A=1; {TRAIN} $B", "line 1: A has another value before the script sets it"),
        (f"f() {{ local -n o=$1; o=(--a); }}; f A; {TRAIN} ${{A[@]}}", "line 1: local -n o is not followed"),
        (f"declare -n R=A; R=5; {TRAIN} $A", "line 1: declare -n R is not followed"),
        (f"A=a:~/b; {TRAIN} $A", "line 1: the value of A is not followed: ~ after a colon"),
        (f"{{ echo 1; }} > f; {TRAIN} $(cat f)", "line 1: $(cat f): the script writes f"),
        (f"printf 1 > f; A=$(head -1 < ./f); {TRAIN} $A", "the script writes f"),
        (f"echo 1 > f; echo 2 > f; sed -i s/1/2/ f; {TRAIN} $(cat f)", "the script writes f"),
        (f"echo 1 | xargs -n1 {TRAIN}", "line 1: the words that xargs appends are not followed"),
        (f"parallel bash -c '{TRAIN} $0' ::: 1", "line 1: the words that parallel appends are not followed"),
        (f"export A=1; env -u A bash -c '{TRAIN} $A'", "line 1: the options of env are not followed"),
        (f"curl x | bash; {TRAIN} 1", "line 1: the commands that bash reads are not followed"),
    ],
)
def test_what_is_not_followed_is_named_with_its_line(script: str, doubt: str) -> None:
    doubts = [text for launch in read_script(script, {}, name="s.sh").launches for text in launch.doubts]
    assert any(doubt in text for text in doubts) if doubt else doubts == [], doubts


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"A=1\nselect x in a b; do {TRAIN} $x; done", "s.sh: line 2: cannot interpret 'select x in a b"),
        (f"case a in !(b)) {TRAIN} 1;; esac", "s.sh: line 1: cannot interpret"),
        (f"A='x\n{TRAIN} 1", "s.sh: line 1: cannot interpret a quote without its end"),
        (f"{TRAIN} ([0]*1+[1]*2) --x 1", "s.sh: line 1: cannot interpret '([0]*1+[1]*2)"),
        (f"[[ a ]] {TRAIN} 1", "s.sh: line 1: cannot interpret"),
        (f"if true; then {TRAIN} 1", "s.sh: line 1: cannot interpret the end of the script"),
        (f"{TRAIN} 1\r\n", "s.sh: has Windows line ends"),
        (f'read L; CMD="$L {TRAIN} 1"; $CMD', "not followed: line 1: read is not followed"),
        ('CMD="torchrun pretrain_gpt.py\n --s 1"; eval "$CMD"', "s.sh: no command runs a Python program with flags"),
        ("while true; do :; done", "more than 10,000 commands"),
        ("bash train.sh --s 1", "s.sh: no command runs a Python program"),
        (f"coproc {TRAIN} 1", "s.sh: line 1: cannot interpret 'coproc"),
    ],
)
def test_a_script_without_a_readable_command_is_refused_with_the_line(script: str, said: str) -> None:
    with pytest.raises(ScriptError) as error:
        read_script(script, {}, name="s.sh")
    assert said in str(error.value)
