"""A round trip of one tensor through pages with given launchers, compared with slices of bytes. Contains no tests."""

from types import ModuleType

import torch

from megatron.core.transformer.moe.paged_stash.page_layout import PlacedTensor, PoolLayout, TensorSpec, encode_tensors

POISON = 0xA5


def copy_there_and_back(
    launchers: ModuleType, spec: TensorSpec, *, rows: int, layout: PoolLayout, offset: int = 0, device: str = "cpu"
) -> None:
    """Copies a tensor into the last pages of both tiers and back. offset: bytes before the tensor in its memory."""
    pages = layout.pages_for(rows * spec.row_bytes)
    on_host = min(pages, layout.host_pages)
    ids = [layout.device_pages - 1 - index for index in range(pages - on_host)]
    ids += [layout.num_pages - 1 - index for index in range(on_host)]
    held = torch.tensor([[pages, rows, 0, on_host]], device=device)
    state = {"table": torch.tensor(ids, device=device), "held": held}
    numbers = {"layout": layout.numbers, "tensors": encode_tensors([PlacedTensor(spec, 0, 0)])}
    # Left uninitialized, so that most of it occupies no physical memory.
    device_pages = torch.empty(layout.device_pages * layout.page_bytes, dtype=torch.uint8, device=device)
    host_pages = torch.empty(layout.host_pages * layout.page_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    size = (spec.max_rows - 1) * spec.pitch_bytes + spec.row_bytes
    memories = [torch.empty(offset + size, dtype=torch.uint8, device=device)[offset:] for _ in range(2)]
    shape, strides = (spec.max_rows, spec.row_bytes), (spec.pitch_bytes, 1)
    source, target = (memory.as_strided(shape, strides, offset) for memory in memories)
    torch.manual_seed(0)
    live = torch.randint(256, (rows, spec.row_bytes), dtype=torch.uint8, device=device)
    source[:rows] = live
    # Watches the first few bytes of the gap after each row, which must not change.
    gap = min(spec.pitch_bytes - spec.row_bytes, 8)
    between = memories[1].as_strided((spec.max_rows - 1, gap), strides, offset + spec.row_bytes)
    for watched in (target, between):
        watched.fill_(POISON)
    launchers.stash(memories[:1], device_pages, host_pages=host_pages, num_programs=0, **state, **numbers)
    launchers.restore(device_pages, host_pages, targets=memories[1:], num_programs=3, **state, **numbers)
    assert torch.equal(target[:rows], live)
    assert (target[rows:] == POISON).all() and (between == POISON).all()
    for place, expected in zip(ids, live.flatten().split(layout.page_bytes), strict=True):
        is_host = place >= layout.device_pages
        start = (place - layout.device_pages * is_host) * layout.page_bytes
        found = (host_pages if is_host else device_pages)[start : start + len(expected)]
        assert torch.equal(found.to(device), expected)
