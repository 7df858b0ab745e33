"""The ways of a token through expert layers, and of a saved activation into pages, stay as short as they are."""

import pytest

from tests.distributed.token_walk import Buffers, report, trace_activation, trace_token
from tests.distributed.walks import lines, paths

# Files of megatron.core that are entered today. Lower them with the code; a new file on a way needs a reason.
FILES = {Buffers.DYNAMIC: 15, Buffers.STATIC: 17, Buffers.STASH: 24}
FILES_OF_ACTIVATION = 8


@pytest.mark.parametrize("buffers", Buffers)
def test_a_token_enters_no_more_files_than_before(buffers):
    walk = trace_token(buffers)[0]
    assert len(paths(walk)) <= FILES[buffers], report(buffers.value, walk)


def test_a_saved_activation_enters_no_more_files_than_before():
    walk = trace_activation()
    assert len(paths(walk)) <= FILES_OF_ACTIVATION, report("saved activation", walk)


def test_the_way_of_an_activation_leads_into_pages_and_back():
    walk = lines(trace_activation())
    landmarks = ["PagedStash.context", "StashGroup.pack", "PagePool.plan", "PagePool.stash", "PagePool.restore"]
    landmarks += ["PagePool.release", "PagedStash.reset"]
    first = [next(index for index, line in enumerate(walk) if line.endswith(name)) for name in landmarks]
    assert first == sorted(first)
