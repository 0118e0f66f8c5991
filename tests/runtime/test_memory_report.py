"""The ledger of memory: every figure against one counted by hand, the page, and the picture."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from transformers import PreTrainedModel

from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.memory_picture import draw
from runtime.memory_report import HitRate, MemoryReport, RequestMemory, format_bytes, take_report
from runtime.request import Request, RequestStatus
from runtime.scheduler import Scheduler

MakeEngine = Callable[..., Engine]
Drain = Callable[[Engine], dict[str, RequestOutput]]
ROOT = Path(__file__).parents[2]
COMMON = list(range(8))
LONG = SamplingParams(max_tokens=30, temperature=0)
BLOCK_BYTES = 3 * 2 * 2 * 8 * 4 * 4  # of the tiny llama: layers, K and V, heads, head dim, float32, tokens a block
BLUE, SAND, WHITE = (0, 114, 178), (243, 223, 168), (255, 255, 255)


@pytest.fixture(scope="module")
def llama(tiny_model) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def shared(llama: PreTrainedModel, make_engine: MakeEngine) -> Engine:
    """Requests a and b with 8 tokens in common, after two steps and one; c is a fork of a that has not run yet."""
    engine = make_engine(llama)
    engine.add_request([*COMMON, 50], LONG, request_id="a")
    engine.step()
    engine.add_request([*COMMON, 60], LONG, request_id="b")
    engine.step()
    engine.fork("a", new_id="c")
    return engine


def make_request(name: str, num_tokens: int, first: int = 0) -> Request:
    tokens = range(first, first + num_tokens)
    return Request(name, tokens, LONG, arrival=0, eos_token_ids=frozenset(), max_model_len=1000)


def make_scheduler(num_blocks: int, block_size: int = 4) -> Scheduler:
    manager = KVCacheManager(num_blocks, block_size)
    return Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=100_000)


def compute(scheduler: Scheduler, *requests: Request) -> None:
    """Give requests blocks and run all their tokens, without the engine's next token."""
    for request in requests:
        assert scheduler.manager.allocate_slots(request, request.num_tokens) is not None
        scheduler.manager.finish_transfers()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        scheduler.manager.publish(request, request.num_tokens)


def report_of(scheduler: Scheduler, *requests: Request) -> MemoryReport:
    return take_report(scheduler, requests, weights=1, activations=2, bytes_per_block=1024)


def rows(request: RequestMemory) -> list[tuple[int, int, int]]:
    return [(entry.block_id, entry.num_written, entry.num_tokens) for entry in request.table]


def share(path: Path, colour: tuple[int, int, int]) -> float:
    """The share of a PNG's pixels that have a colour."""
    pixels = np.rint(imread(path)[..., :3] * 255).astype(int)
    return float((pixels == colour).all(-1).mean())


def test_tables_say_what_each_block_holds(shared: Engine) -> None:
    a, b, c = shared.memory_report().requests
    assert [request.request_id for request in (a, b, c)] == ["a", "b", "c"]
    assert {request.status for request in (a, b, c)} == {"running"}
    assert [(request.num_tokens, request.num_computed_tokens) for request in (a, b, c)] == [(11, 10), (10, 9), (11, 10)]
    assert rows(a) == rows(c) == [(1, 4, 4), (2, 4, 4), (3, 2, 3)]
    assert rows(b) == [(1, 4, 4), (2, 4, 4), (4, 1, 2)]
    assert [entry.shared for entry in a.table] == [True, True, True]
    assert [entry.shared for entry in b.table] == [True, True, False]
    assert all([entry.published for entry in request.table] == [True, True, False] for request in (a, b, c))


def test_pool_figures_are_those_counted_by_hand(shared: Engine) -> None:
    report = shared.memory_report()
    pool = report.pool
    assert (pool.num_blocks, pool.block_size, pool.bytes_per_block) == (80, 4, BLOCK_BYTES)
    assert (pool.num_used, pool.num_free) == (4, 75)
    # Blocks 1 and 2 are full; 3, held by a and c, has 2 tokens and a known one; 4 has 1 and a known one.
    assert (pool.written_slots, pool.reserved_slots, pool.wasted_slots) == (4 + 4 + 2 + 1, 1 + 1, 1 + 2)
    assert pool.wasted_bytes == 3 * BLOCK_BYTES // 4
    assert (pool.num_saved, pool.saved_bytes) == (9 - 4, 5 * BLOCK_BYTES)
    assert (pool.cached_block_ids, pool.copied_block_ids) == ((), ())
    assert report.prefix_cache == HitRate(hits=8, queries=18)
    assert report.prefix_cache.rate == 8 / 18
    assert report.resumed.rate is None, "nobody was preempted"


def test_bytes_by_owner(shared: Engine) -> None:
    report = shared.memory_report()
    assert report.weights == sum(parameter.nbytes for parameter in shared.model.parameters())
    assert report.pool.nbytes == shared.runner.cache.nbytes == 80 * BLOCK_BYTES
    assert report.activations >= report.max_num_seqs * shared.vocab_size * 4, "at least the logits"
    assert (report.max_num_batched_tokens, report.max_num_seqs) == (2048, 256)
    assert report.graphs == 0
    assert report.swap == report.num_swap_blocks * BLOCK_BYTES == shared.runner.swap_space.nbytes
    assert report.num_swap_blocks_used == 0


def test_activations_are_estimated_once(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    small = make_engine(llama, max_num_batched_tokens=16, max_num_seqs=2)
    estimated = small.memory_report().activations
    assert estimated < make_engine(llama).memory_report().activations
    small.runner.cache.k.clear()  # without caches no forward could run
    assert small.memory_report().activations == estimated


def test_what_has_ended_leaves_a_reusable_prefix(shared: Engine, drain: Drain) -> None:
    drain(shared)
    report = shared.memory_report()
    assert report.requests == ()
    pool = report.pool
    assert (pool.num_used, pool.num_free, pool.num_saved) == (0, 79, 0)
    assert (pool.written_slots, pool.reserved_slots, pool.wasted_slots) == (0, 0, 0)
    # Each wrote 9 + 29 tokens, 9 full blocks, of which the first two are one and the same.
    assert len(pool.cached_block_ids) == 2 + 3 * 7
    assert {1, 2} <= set(pool.cached_block_ids)
    assert shared.reset_prefix_cache()
    assert shared.memory_report().pool.cached_block_ids == ()


def test_a_chunk_of_a_prompt_reserves_the_rest(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, max_num_batched_tokens=5)
    engine.add_request(list(range(10)), LONG)
    waiting = engine.memory_report()
    assert [(request.status, request.table) for request in waiting.requests] == [("waiting", ())]
    assert waiting.prefix_cache.rate is None
    engine.step()
    report = engine.memory_report()
    assert rows(report.requests[0]) == [(1, 4, 4), (2, 1, 4), (3, 0, 2)]
    assert (report.pool.written_slots, report.pool.reserved_slots, report.pool.wasted_slots) == (5, 5, 2)


def test_preempted_requests_hold_nothing_and_count_apart(shared: Engine) -> None:
    before = shared.memory_report()
    shared.scheduler.preempt_all()
    report = shared.memory_report()
    assert [(request.status, request.num_tokens) for request in report.requests] == [
        ("preempted", 11),
        ("preempted", 10),
        ("preempted", 11),
    ]
    assert all(request.table == () and request.num_computed_tokens == 0 for request in report.requests)
    assert (report.pool.num_used, report.pool.wasted_slots) == (0, 0)
    assert report.pool.cached_block_ids == (1, 2)
    shared.step()
    resumed = shared.memory_report()
    assert resumed.prefix_cache == before.prefix_cache
    assert resumed.resumed.queries == 11 + 10 + 11
    assert resumed.resumed.hits >= 3 * 8


def test_swapped_out_requests_show_in_the_swap_space(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, num_blocks=11, preemption="swap", swap_space=2**-10)
    for name in "ab":
        engine.add_request([ord(name)] * 9, LONG, request_id=name)
    while engine.stats().num_preemptions == 0:
        engine.step()
    report = engine.memory_report()
    assert [(request.request_id, request.status) for request in report.requests] == [
        ("a", "running"),
        ("b", "swapped out"),
    ]
    # 10 usable blocks, 5 for each; a asked for its sixth when b had written 20 tokens.
    assert report.num_swap_blocks_used == 5
    assert report.num_swap_blocks == 2**20 // BLOCK_BYTES
    assert f"5 of {report.num_swap_blocks} blocks used" in str(report)


def test_every_beam_is_a_sequence(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    engine.add_request([*COMMON, 50], BeamSearchParams(beam_width=3, max_tokens=8), request_id="a")
    for _ in range(2):
        engine.step()
    report = engine.memory_report()
    assert len(report.requests) == 3
    assert all(request.status == "running" for request in report.requests)
    assert all(rows(request)[:2] == [(1, 4, 4), (2, 4, 4)] for request in report.requests)
    assert report.pool.num_saved == sum(len(request.table) for request in report.requests) - report.pool.num_used


def test_the_textbooks_example_wastes_five_slots() -> None:
    scheduler = make_scheduler(17)
    requests = [make_request(name, count, 100 * count) for name, count in (("a", 6), ("b", 7), ("c", 6))]
    compute(scheduler, *requests)
    pool = report_of(scheduler, *requests).pool
    assert (pool.num_used, pool.written_slots, pool.reserved_slots) == (6, 19, 0)
    assert (pool.wasted_slots, pool.wasted_bytes) == (2 + 1 + 2, 5 * 256)


def test_a_block_that_only_a_copy_still_reads_is_used() -> None:
    scheduler = make_scheduler(9)
    manager, parent = scheduler.manager, make_request("a", 6)
    compute(scheduler, parent)
    child = parent.fork("b")
    manager.fork(parent, child)
    child.append_token(7)
    assert manager.allocate_slots(child, 7) is not None
    manager.free(parent)
    pool = report_of(scheduler, child).pool
    assert (pool.num_used, pool.copied_block_ids) == (3, (2,))
    assert (pool.written_slots, pool.reserved_slots, pool.wasted_slots) == (6, 1, 1)


def test_the_page_can_be_read(shared: Engine) -> None:
    page = str(shared.memory_report())
    lines = page.splitlines()
    assert lines[0] == "memory by owner"
    pool = next(line for line in lines if line.startswith("  pool "))
    assert " ".join(pool.split()) == "pool 120.0 KiB 80 blocks of 4 tokens, 1.5 KiB each"
    assert "estimate: a step of 2048 tokens, 256 sequences, uncompiled" in page
    assert "  4 used (#), 75 free, 0 of them with a reusable prefix (o), 1 null" in lines
    assert "  slots of used blocks: 11 written, 2 reserved, 3 wasted (1.1 KiB)" in lines
    assert "  sharing saves 5 blocks (7.5 KiB)" in lines
    assert "  prefix cache hits: 8 of 18 tokens (44%); of resumed requests: no look-ups" in lines
    assert "  b  running  10 tokens  logical 0..2 -> physical 1+* 2+* 4  fill 4/4 4/4 1/4" in lines
    assert lines[-1].startswith("  c  running")
    assert page.endswith("\n")


def test_activations_may_be_unknown(tmp_path: Path) -> None:
    report = replace(report_of(make_scheduler(9)), activations=None)
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert "activations unknown an artifact holds no model to estimate them with; not in the total" in lines
    assert "total 9.0 KiB" in lines
    draw(report, path := tmp_path / "unknown.svg")
    assert "activations (estimate) unknown" in path.read_text()
    assert asdict(report)["activations"] is None


def test_a_long_page_is_abbreviated() -> None:
    scheduler = make_scheduler(2000)
    requests = [make_request(f"r{index}", 80 + index, 1000 * index) for index in range(50)]
    compute(scheduler, *requests)
    waiting = make_request("last", 3)
    lines = str(report_of(scheduler, *requests, waiting)).splitlines()
    expected = "logical 0..19 -> physical 1+ 2+ 3+ ... 18+ 19+ 20+  fill 4/4 4/4 4/4 ... 4/4 4/4 4/4"
    assert f"  r0   running  80 tokens  {expected}" in lines
    assert lines[-1] == "  ... and 11 more"
    assert str(report_of(scheduler, waiting)).splitlines()[-1] == "  last  waiting  3 tokens  no blocks"
    assert max(map(len, lines)) < 160


def test_the_bar_shows_used_and_reusable_blocks_in_proportion() -> None:
    scheduler = make_scheduler(65)
    old, new = make_request("old", 40), make_request("new", 64, 100)
    compute(scheduler, old)
    scheduler.manager.free(old)
    compute(scheduler, new)
    (bar,) = [line for line in str(report_of(scheduler, new)).splitlines() if line.startswith("pool  [")]
    assert bar == f"pool  [{'#' * 16}{'o' * 10}{'.' * 38}]"


def test_a_report_is_frozen_and_json_can_hold_it(shared: Engine) -> None:
    report = shared.memory_report()
    with pytest.raises(FrozenInstanceError):
        report.weights = 0  # type: ignore[misc]
    stored = json.loads(json.dumps(asdict(report)))
    assert stored["pool"]["wasted_slots"] == 3
    assert stored["requests"][1]["table"][2] == {
        "block_id": 4,
        "num_tokens": 2,
        "num_written": 1,
        "shared": False,
        "published": False,
    }
    assert stored["prefix_cache"] == {"hits": 8, "queries": 18}


def test_reports_change_nothing(llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Callable) -> None:
    engine = make_engine(llama)
    engine.add_request([*COMMON, 50], LONG, request_id="a")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        engine.memory_report()
        engine.check_integrity()
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == hf_greedy(llama, [*COMMON, 50], 30)


@pytest.mark.compile
def test_a_report_leaves_the_compiled_graph_in_place(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, backend="inductor")
    first = engine.generate([COMMON], LONG, progress=False)
    assert engine.memory_report().activations > 0
    assert engine.generate([COMMON], LONG, progress=False)[0].outputs == first[0].outputs
    assert engine.stats().num_recompiles == 0


def test_a_closed_engine_has_no_report(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.memory_report()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_bytes_in_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_picture_shows_requests_and_what_they_leave(shared: Engine, drain: Drain, tmp_path: Path) -> None:
    during, after = tmp_path / "during.png", tmp_path / "after.png"
    draw(shared.memory_report(), during)
    drain(shared)
    draw(shared.memory_report(), str(after))
    for path in (during, after):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert imread(path).shape[:2] == (1125, 1950)
        assert share(path, WHITE) > 0.3
    assert share(during, BLUE) > 0.01
    assert share(after, BLUE) == 0
    assert share(after, SAND) > 10 * share(during, SAND), "before, it is in the legend only"


def test_blocks_are_filled_as_far_as_tokens_go(tmp_path: Path) -> None:
    areas = []
    for count in (1, 2, 4):
        scheduler, request = make_scheduler(4), make_request("a", count)
        compute(scheduler, request)
        draw(report_of(scheduler, request), path := tmp_path / f"{count}.png")
        areas.append(share(path, BLUE))
    legend = 2 * areas[0] - areas[1]  # of the blue outside of the block, which is in all of them
    assert 0 < legend < areas[0] / 2
    assert areas[2] - legend == pytest.approx(4 * (areas[0] - legend), rel=0.1), "a quarter of the block, and all of it"


@pytest.mark.parametrize("num_blocks", [2, 12, 161, 8000, 25_000])
def test_pools_of_any_size_make_a_picture_of_one_size(num_blocks: int, tmp_path: Path) -> None:
    scheduler = make_scheduler(num_blocks, 16)
    draw(report_of(scheduler), empty := tmp_path / "empty.png")
    requests = [make_request(f"r{i}", num_blocks * 16 // 25, 10_000 * i) for i in range(20 if num_blocks > 12 else 1)]
    compute(scheduler, *requests)
    draw(report_of(scheduler, *requests), busy := tmp_path / "busy.png")
    assert imread(empty).shape == imread(busy).shape
    assert share(busy, WHITE) < share(empty, WHITE)
    assert 10_000 < busy.stat().st_size < 1_000_000


def test_a_vector_picture_names_the_requests_as_they_are(tmp_path: Path) -> None:
    scheduler = make_scheduler(12)
    names = ["_$x_1$", "a" * 100, "µ\\frac"]
    requests = [make_request(name, 5, 100 * index) for index, name in enumerate(names)]
    compute(scheduler, *requests)
    draw(report_of(scheduler, *requests), path := tmp_path / "tables.svg")
    assert path.read_text().count("<!-- _$x_1$") == 2, "in the legend and above its table"
    assert f"<!-- {'a' * 23}… -->" in path.read_text()
    assert "<!-- µ\\frac -->" in path.read_text()


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tests_report import report\n"
        "import runtime.memory_picture\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"runtime.memory_picture.draw(report, {str(tmp_path / 'a.png')!r})\n"
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)\n"
    )
    (tmp_path / "tests_report.py").write_text(
        "from runtime.memory.kv_cache_manager import KVCacheManager\n"
        "from runtime.memory_report import take_report\n"
        "from runtime.scheduler import Scheduler\n"
        "scheduler = Scheduler(KVCacheManager(9, 4), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)\n"
        "report = take_report(scheduler, [], weights=1, activations=1, bytes_per_block=64)\n"
    )
    setup = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
    done = subprocess.run([sys.executable, "-P", "-c", setup + code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
