"""Logs with every field that a run may write, and browser queries about a report's page. Contains no tests."""

import json
from pathlib import Path

# For each diagram: drawn marks, axis titles, and texts outside its area. For the page: elements that are too wide.
PAGE_FACTS = """({
  width: document.documentElement.scrollWidth, text: document.body.innerText,
  drawn: [...document.querySelectorAll(".plot")].map(plot => [plot.parentElement.id,
    plot.querySelectorAll(".scatterlayer .trace, .heatmaplayer image, .barlayer .trace").length,
    plot.querySelectorAll(".xtitle, .ytitle").length]),
  cut: [...document.querySelectorAll(".plot")].flatMap(plot => {
    const frame = plot.getBoundingClientRect();
    return [...plot.querySelectorAll("svg text")].filter(text => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1 ||
                           box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map(text => plot.parentElement.id + ": " + text.textContent);
  }).concat([...document.querySelectorAll(".card, .facts div, .bar")]
    .filter(card => card.scrollWidth > card.clientWidth + 1).map(card => card.id || card.className || card.innerText)),
})"""
GATHER = {"name": "chunk 0 dense 1", "traffic": "gather", "bytes": 2048, "ready_ms": 0, "launched_ms": 1, "done_ms": 5}
REDUCE = {"name": "chunk 0 dense 0", "traffic": "reduce", "bytes": 1024, "ready_ms": 6, "launched_ms": 7, "done_ms": 9}
OVERLAP = {
    "hidden_share": 0.9,
    "exposed_reduce_ms": 2.0,
    "exposed_gather_ms": 0.0,
    "hidden_reduce_ms": 1.0,
    "hidden_gather_ms": 4.0,
    "backward_end_ms": 8,
    "transfers": [{**GATHER, "waits_ms": []}, {**REDUCE, "waits_ms": [[8, 9], [10, 11]]}],
}
CHANGES = [[0, 2, 7, 0], [1, 3, 3, 2], [2, 3, -3, -2], [2, 2, -7, 0]]
POOL: dict[str, object] = {"rank": 1, "device_pages": 10, "host_pages": 4, "page_bytes": 64}
POOL |= {"device_high_water": 10, "host_high_water": 2, "planned_pages": 12, "spilled_pages": 2}
POOL |= {"live_bytes": 700, "tail_bytes": 68, "dropped_gate_up": 1}
POOL |= {"factor": 1.0, "factors_needed": [1.1, 1.2]}
POOL |= {"timeline": {"passes": [2, 3, -3, -2], "changes": CHANGES}}
STASH: dict[str, object] = {"steps": 2, "void_steps": 1, "capacity_factor": 1.5, "factors_needed": [1.25, 1.0]}
STASH |= {"balanced_rows": 8, "buffer_rows": 12, "rows": {"2": 9, "3": 10}, "pool": POOL}
STASH |= {"rungs": {"spilled_pages": [0, 2], "void_steps": [1, 0]}}
SIZES = {"parameters": 2000, "gradients": 4000, "masters": 0, "moments": 8000, "pages": 640, "host_pages": 256}
HELD = {"rank_0": {**SIZES, "peak_rss": 2**28}, "max": {**SIZES, "peak_rss": 2**29}}
HELD |= {"stages": {"0": HELD["rank_0"], "1": {**SIZES, "parameters": 2100, "peak_rss": 2**29}}}
RECORD = {
    "flags": {"num_layers": 3, "seed": 1234, "data_path": ["0.5", "</script>"], "mock_data": False, "seq_length": 8},
    "environment": {"device": "cpu", "world_size": 2},
    "model": {"parameters": 1_234_567, "active_parameters": 1000, "flops_per_token": 6.0},
    "starts": [{"started": "2026-01-01", "iteration": 0}, {"started": "2026-01-02", "iteration": 8}],
}


def write_log(folder: Path, num_steps: int, *, layers: int = 2, extra: str = "", **record: object) -> Path:
    """Writes the log of a run with every possible field. extra: appended verbatim to the last lines."""
    folder.mkdir()
    lines = []
    for step in range(1, num_steps + 1):
        line: dict[str, object] = {"iteration": step, "lm_loss": "NaN" if step == 5 else 2 + 1 / step}
        line |= {"z_loss": 1 / step, "accuracy": 0.5, "grad_norm": "Infinity" if step == 7 else 1 / step}
        line |= {"learning_rate": 1e-3, "global_batch_size": 4, "consumed_samples": 4 * step, "skipped": step == 7}
        line |= {
            "loss_scale": 2.0 ** (16 - step % 3),
            "seconds": 0.1,
            "tokens_per_second": 1e3,
            "tflops": 1.0,
            "mfu": 0.3,
        }
        line |= {"memory": {"rss": 2**30, "peak_rss": 2**31}, "timers": {"optimizer": 3.0}, "num_zeros": None}
        line |= {"expert_load": {str(layer): [step, 3, 0, 5] for layer in range(1, layers + 1)}}
        line |= {"overlap": OVERLAP}
        line |= {"held": HELD} if step == 1 or step % 2 == 0 else {}
        line |= {"stash": STASH} if step % 2 == 0 or step == num_steps else {}
        line |= {"per_layer": {"load_balancing_loss": {str(layer): 1 / layer for layer in range(1, layers + 1)}}}
        lines += [json.dumps(line), json.dumps({"iteration": step, "validation_loss": 2.5})]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n" + extra)
    if record:
        (folder / "run.json").write_text(json.dumps(record))
    return folder
