"""Runs scripts and their translations by bash with programs that record their arguments, and draws scripts.

The programs torchrun, srun, ssh and sbatch are stand-ins: torchrun writes its arguments, the others run commands.
"""

import contextlib
import io
import random
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from megatron.tools.bash_reader import Launch
from megatron.tools.translate_flags import Translation, print_translation

_PROGRAMS = {
    "torchrun": r"""printf '%s\0' torchrun "X=${X-unset}" "$@" >>"$OUT"; printf '\n\0' >>"$OUT" """,
    "srun": r"""printf '%s\0' srun >>"$OUT"
while [[ $1 == -* ]]; do printf '%s\0' "$1" >>"$OUT"; shift; done
SLURM_PROCID=3 exec "$@" """,
    "ssh": r"""printf '%s\0' ssh "$1" >>"$OUT"; shift
run=(env -i OUT="$OUT" PATH="$PATH" bash)
if [ $# = 0 ]; then "${run[@]}"; else "${run[@]}" -c "$*"; fi""",
    "sbatch": r"""printf '%s\0' sbatch >>"$OUT"
while [[ $1 == -* ]]; do if [ "$1" = --wrap ]; then exec bash -c "$2"; fi; shift; done
exec bash "$@" """,
}


@cache
def _programs() -> str:
    folder = Path(tempfile.mkdtemp(prefix="programs_"))
    for name, body in _PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def recorded(script: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns what the programs record while bash runs a script in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "s.sh"), Path(folder, "out")
        path.write_text(script)
        output.touch()
        variables = {
            "PATH": f"{_programs()}:/usr/bin:/bin",
            "OUT": str(output),
            "HOME": "/home/u",
            **(environment or {}),
        }
        subprocess.run(
            ["bash", str(path)],
            env=variables,
            cwd=folder,
            capture_output=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return output.read_text().split("\0")[:-1]


def translated(launch: Launch) -> str:
    """Returns the command as translate_flags prints it, with all flags unchanged."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        print_translation(Translation(launch, (), None))
    return output.getvalue()


def drawn_script(seed: int) -> str:
    """Returns a script of up to five statements before a training command, in the constructs that are followed."""
    draw = random.Random(seed)
    names = "A=a.b; B='a  b'; N=3; L=(a 'b c'); f() { return ${1:+1}; }\n"
    first = names if draw.random() < 0.8 else "f() { return 0; }; N=1\n"
    statements = [_statement(draw) for _ in range(draw.randrange(1, 6))]
    return first + "\n".join([*statements, _command(draw)]) + "\n"


_SCALARS = r"""%.* %%.* #*. ##*/ /a/b //[ab]/- ^^ , ^ :1 :1:2 :\ -2 :0:-1 :-d :- -d :+q +q /%b/z /#a/z""".split(" ")
_SCALARS = [text.replace("\\", " ") for text in _SCALARS]
_QUOTED = ["%.*", "##*/", "/a/b", "//./-", "^^", ":1:2", ":-d e", ":-'q'", "-d", ":+q r", "+q", ':-"x y"']
_ARRAYS = r"""
"${L[@]}"|${L[@]}|"${L[*]}"|${L[*]}|${#L[@]}|${L[1]}|"${L[0]}"|${L[-1]}|"p${L[@]}s"|"${L[@]:1}"|${L[@]:0:1}|$L
|"${L[@]/a/z}"|${!L[@]}|${#A}|"${L[@]:-x y}"|$@|"$@"|$#|$1|"$2"|"$*"|$*|"${@:2}"|${3:-z}|"x$@y"
"""
_NUMBERS = "$((A1+2))|$((2*N))|$(($N%3-5))|$((N>2?N:-1))|$((N/2))|$(( (N+1)*2 ))|$((N++))|$((N==3&&1))"
_OUTPUTS = r"""
$(date +%Y)|"$(printf %s- $A "$B")"|$(expr $N + 1)|`echo $A`|$(basename /x/y.sh .sh)|$(seq 1 $N)
|$(printf '%s ' "${L[@]}")|$(cat <<< "$B")
"""
_TEXTS = r"""
a|1|x.y|--k|-3|a/b.c.d|b=c|{a,b}|x{1..3}|\$A|a\ b|\"|$'a\tb'|~/q|""|''|{1}|x{a,$A}y|"a\\b"|"\$A"|*.zz|'[0]'*2|a#b
|'a b'|'$A'|'"q"'|'\n'
"""
_CONDITIONS = r"""
[ -z "$UN" ]
[ "$A" = "$B" ]
[ $N -gt 2 ]
[[ $A == a* ]]
[[ "$A" == "a*" ]]
[[ -n $B && $N -lt 5 ]]
(( N > 2 ))
[ -n $UN ]
[ "$A" != x -a $N -ge 1 ]
! [ $N -eq 3 ]
[[ ! $A =~ ^a ]]
true
false
test "$B"
[[ $A < $B ]]
[ $# -gt 1 ]
[[ $N -eq 1+2 ]]
[ -f /nowhere ]
[ "$(date +%Y)" = x ]
[[ $C ]]
f q
[ -v UN ]
[[ -v A ]]
[ ! -z "$A" -o 1 = 2 ]
"""


def _one(draw: random.Random, texts: str) -> str:
    return draw.choice(texts.replace("\n", "").split("|"))


def _word(draw: random.Random, depth: int = 0) -> str:
    name = draw.choice(["A", "B", "C", "UN"])
    plain: list[Callable[[], str]] = [
        lambda: f"${name}",
        lambda: f'"${name}"',
        lambda: f"${{{name}{draw.choice(_SCALARS)}}}",
        lambda: f'"${{{name}{draw.choice(_QUOTED)}}}"',
        lambda: _one(draw, _ARRAYS),
        lambda: _one(draw, _ARRAYS),
        lambda: _one(draw, _NUMBERS),
        lambda: _one(draw, _TEXTS),
        lambda: _one(draw, _TEXTS),
    ]
    nested: list[Callable[[], str]] = [
        lambda: f"$(echo {_word(draw, depth + 1)})",
        lambda: f'"$(echo {_word(draw, depth + 1)})"',
        lambda: _one(draw, _OUTPUTS),
        lambda: _word(draw, depth + 1) + _word(draw, depth + 1),
        lambda: f'"{draw.choice(["x", "$A", "${B:-c}"])} {draw.choice(["y", "$N", "${L[*]}", "$(echo $A)"])}"',
    ]
    return draw.choice(plain if depth > 1 else [*plain, *nested])()


def _condition(draw: random.Random) -> str:
    return draw.choice(_CONDITIONS.strip("\n").split("\n"))


def _statement(draw: random.Random, depth: int = 0) -> str:
    name = draw.choice(["A", "B", "C"])

    def inner() -> str:
        return _statement(draw, depth + 1)

    def element() -> str:
        change = draw.choice([f"L[{draw.randrange(4)}]", "L[N]", "L[-1]", "L+", "export B", "declare C"])
        return f"{change}={_word(draw)}"

    plain: list[Callable[[], str]] = [
        lambda: f"{name}={_word(draw)}",
        lambda: f"{name}+={_word(draw)}",
        lambda: f"L{draw.choice(['', '+'])}=({_word(draw)} {_word(draw)})",
        element,
        lambda: draw.choice(["let N+=1", "(( N = N + 2 ))", "N=4", "unset C", "eval 'C=\"$A\"'", ":", "readonly RO=1"]),
        lambda: draw.choice(["set -- p 'q r'", "shift", 'set -- "$@" z', "set -x; set +x", "shift 5"]),
        lambda: f"{name}=5 echo {_word(draw)} > /dev/null",
    ]
    if depth > 1:
        return draw.choice(plain)()
    nested: list[Callable[[], str]] = [
        lambda: f"{_condition(draw)} {draw.choice(['&&', '||'])} {inner()}",
        lambda: f"if {_condition(draw)}; then {inner()}; else {inner()}; fi",
        lambda: f"if {_condition(draw)}\nthen\n {inner()}\nelif {_condition(draw)}; then {inner()}\nfi",
        lambda: f"for w in {_word(draw)} {_word(draw)}; do {inner()}; A=$w; done",
        lambda: f"case {_word(draw)} in a*|$B) {inner()};; [0-9]) C=n;; *) {inner()};; esac",
        lambda: f"( {inner()} )",
        lambda: f"{{ {inner()}; {inner()}; }}",
        lambda: f"h() {{ local {name}=${{1:-l}}; {inner()}; C=$1; return {draw.choice('01')}; }}\nh {_word(draw)}",
        lambda: f"for ((i=0;i<2;i++)); do {inner()}; {name}+=$i; done",
        lambda: f"i=0; while [ $i -lt 2 ]; do {inner()}; i=$((i+1)); [ $N = 3 ] && break; done",
    ]
    return draw.choice([*plain, *nested])()


def _command(draw: random.Random) -> str:
    words = " ".join(_word(draw) for _ in range(draw.randrange(1, 4)))
    plain = f"torchrun --n $N pretrain_gpt.py --s {words}"
    forms = [
        plain,
        f'CMD="torchrun pretrain_gpt.py\n --s $A --t {draw.choice(["$B", "x_$C", "${L[@]}"])}"\neval $CMD',
        'CMD="torchrun pretrain_gpt.py --s $A --t $B"\n$CMD',
        f'bash -c \'torchrun pretrain_gpt.py --s $A "$B" "$@"\' _ {words}',
        f"srun -l bash -c 'torchrun pretrain_gpt.py --s $A \"$B\" $SLURM_PROCID $1' _ {words}",
        f'cat > r.sh <<E\ntorchrun pretrain_gpt.py --s $A "$B" \\$A "\\$@"\nE\nbash r.sh {words}',
        f'g() {{ torchrun pretrain_gpt.py --s "$@" $#; }}; g {words}',
        f"X=pre {plain}",
        f"{_condition(draw)} && {plain}",
        'ARGS="--s $A $B"; ARGS+=" --t ${C}"; torchrun pretrain_gpt.py $ARGS "${L[@]}"',
        f"torchrun \\\n pretrain_gpt.py \\\n  --s {words} \\\n  --t 'x' # c",
    ]
    return draw.choice(forms)
