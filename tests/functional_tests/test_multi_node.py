"""Two torchrun agents, on one machine or in two network namespaces, train as one agent does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.tools.ports import free_port
from tests.functional_tests.case import command_line, read_bases
from tests.functional_tests.expectations import assert_same_steps
from tests.functional_tests.launch import ROOT, Run, read_log, run_program

NODES = 2
# Tokens travel between the nodes to their experts and back.
FLAGS = {**read_bases()["moe"], "expert-model-parallel-size": NODES, "train-iters": 3, "eval-iters": 0}


@dataclass(frozen=True)
class Node:
    """Describes how to start a process on a node. address: the first node's address, as seen from this node."""

    command: tuple[str, ...]
    address: str
    interface: str


ONE_MACHINE = [Node((), "127.0.0.1", "lo")] * NODES


@pytest.mark.slow
@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(True, id="network namespaces, where allowed"),
        # Soak only, since the case above covers more with namespaces, and is equal to this case without them.
        pytest.param(False, id="one machine", marks=pytest.mark.soak),
    ],
)
def test_two_nodes_train_as_one(apart: bool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = stack.enter_context(_namespaces()) if apart and _may_make_namespaces() else ONE_MACHINE
        argv = [*command_line(FLAGS), "--tensorboard-dir", str(tmp_path)]
        _run_agents(nodes, argv, tmp_path)
    one_agent = run_program(command_line(FLAGS), NODES, folder=tmp_path / "one agent")
    assert one_agent.exit_codes == [0] * NODES, one_agent.written()
    assert_same_steps(Run([], read_log(tmp_path)), one_agent)


def _run_agents(nodes: Sequence[Node], argv: list[str], folder: Path) -> None:
    port = free_port()
    agents = []
    for number, node in enumerate(nodes):
        words = ["--nnodes", str(len(nodes)), "--node-rank", str(number), "--nproc-per-node", "1"]
        words += ["--master-addr", node.address, "--master-port", str(port)]
        launcher = [*node.command, sys.executable, "-m", "torch.distributed.run", *words]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # The host name resolves to an address that is not in the namespace.
            "GLOO_SOCKET_IFNAME": node.interface,
        }
        with (folder / f"node{number}.txt").open("wb") as output:
            command = [*launcher, str(ROOT / "pretrain_gpt.py"), *argv]
            agents.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        codes = [agent.wait(180) for agent in agents]
    finally:
        for agent in agents:
            # torchrun ends its ranks when it is terminated.
            agent.terminate()
            agent.wait()
    written = "\n".join((folder / f"node{number}.txt").read_text() for number in range(len(nodes)))
    assert codes == [0] * len(nodes), written


def _may_make_namespaces() -> bool:
    """Returns whether this process can create network namespaces with the command ip (iproute2)."""
    name = f"try-{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "del", name)
    return True


@contextmanager
def _namespaces() -> Iterator[list[Node]]:
    """Creates two network namespaces joined by a veth pair, and deletes them at the end."""
    names = [f"node{number}-{os.getpid()}" for number in range(NODES)]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth1", "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", f"veth{number}")
            _ip("-n", name, "link", "set", f"veth{number}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [Node(("ip", "netns", "exec", name), "10.213.0.1", f"veth{number}") for number, name in enumerate(names)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
