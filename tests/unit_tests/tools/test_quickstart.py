"""What `make train` decides before it trains: shares of the documents, and whose tokens a folder holds."""

from pathlib import Path

import pytest

from megatron.core.datasets.utils import split_documents
from megatron.tools.quickstart import Workspace, check_source, split_of


@pytest.mark.parametrize("num_documents", [3, 5, 30, 1172, 100_000])
def test_every_part_gets_documents(num_documents: int) -> None:
    parts = [len(part or ()) for part in split_documents(split_of(num_documents), num_documents)]
    assert sum(parts) == num_documents and min(parts) >= 1
    assert parts[0] >= num_documents * 0.6 or num_documents == 3


@pytest.mark.parametrize("num_documents", [0, 1, 2])
def test_too_few_documents_are_refused_by_number(num_documents: int) -> None:
    with pytest.raises(SystemExit, match=f"DATA has {num_documents} documents"):
        split_of(num_documents)


def test_another_text_replaces_tokens_but_never_a_trained_run(tmp_path: Path) -> None:
    folder, text = tmp_path / "run", tmp_path / "text.txt"
    folder.mkdir()
    text.write_text("one")
    workspace = Workspace(folder, text)
    check_source(workspace)
    tokens = folder / "tokens_text_document.idx"
    for content, kept in (("one", True), ("another", False)):
        tokens.touch()
        text.write_text(content)
        check_source(workspace)
        assert tokens.exists() == kept
    workspace.checkpoints.mkdir()
    text.write_text("yet another")
    with pytest.raises(SystemExit, match="was made from"):
        check_source(workspace)
