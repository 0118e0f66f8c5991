"""Engines that replay decode steps: imitated graphs on a CPU, CUDA graphs with `pytest -m cuda` (BEHAVIOURS 29-34)."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from graphs.cuda_graph import CudaGraphs, RecordedGraphs
from graphs.graph_executor import MASKED, GraphExecutor
from graphs.inputs import fill_padding
from models.adapted import AdaptedModel
from models.step_inputs import StepInputs
from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Drain = Callable[[Engine], dict[str, RequestOutput]]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7], [9, 9], [5]]


@pytest.fixture
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def make_graphs(request: pytest.FixtureRequest, make_engine: MakeEngine) -> MakeEngine:
    """`make_engine` with graphs for batches of 1, 2 and 4; `graphs(engine)` is what replays them."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")

    def make(model: PreTrainedModel, **knobs: Any) -> Engine:
        sizes = {"cuda_graphs": True, "cudagraph_capture_sizes": [1, 2, 4]}
        return make_engine(model, **{"device": request.param, "block_size": 8, "debug": True, **sizes, **knobs})

    return make


def graphs(engine: Engine) -> GraphExecutor:
    assert isinstance(engine.runner.executor, GraphExecutor)
    return engine.runner.executor


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Steps:
    """What an engine runs: (tokens, sequences) as filled, and whether a graph was replayed."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        executor = graphs(engine)
        run = executor.run

        def recorded(inputs: StepInputs) -> Any:
            before = executor.num_replays
            outputs = run(inputs)
            self.seen.append((len(inputs.input_ids), len(inputs.seq_lens), executor.num_replays > before))
            return outputs

        monkeypatch.setattr(executor, "run", recorded)


def test_every_family_decodes_by_graphs(
    family: str, tiny_model: TinyModel, make_graphs: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    model = tiny_model(family)
    engine = make_graphs(model)
    ids = [engine.add_request(prompt, greedy(4 + 3 * index)) for index, prompt in enumerate(PROMPTS[:4])]
    outputs = drain(engine)
    assert tokens([outputs[i] for i in ids]) == [
        hf_greedy(model, prompt, 4 + 3 * index) for index, prompt in enumerate(PROMPTS[:4])
    ]
    assert engine.stats().num_graph_replays == 12  # all but the prompts' step


def test_batches_are_padded_to_buckets_and_mixed_ones_are_not_replayed(
    llama: PreTrainedModel, make_graphs: MakeEngine, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_graphs(llama, async_scheduling=False)
    steps = Steps(engine, monkeypatch)
    for index in range(3):
        engine.add_request(PROMPTS[index], greedy(4 if index == 0 else 6))
    engine.step()
    assert steps.seen == [(23, 3, False)]
    engine.step()
    engine.step()
    assert steps.seen[1:] == [(4, 4, True)] * 2
    engine.add_request(PROMPTS[3], greedy(4))
    engine.step()  # the end of one, the prompt of another
    assert steps.seen[3:] == [(5, 4, False)]
    engine.step()
    assert steps.seen[4:] == [(4, 4, True)]
    drain(engine)
    assert steps.seen[5:] == [(4, 4, True), (1, 1, True)] or steps.seen[5:] == [(1, 1, True)]


def test_a_batch_beyond_the_last_bucket_runs_uncaptured(
    llama: PreTrainedModel, make_graphs: MakeEngine, hf_greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_graphs(llama)
    steps = Steps(engine, monkeypatch)
    outputs = engine.generate(PROMPTS, greedy(5), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, prompt, 5) for prompt in PROMPTS]
    assert [(sequences, replayed) for _, sequences, replayed in steps.seen] == [(5, False)] * 5


def test_the_largest_bucket_is_captured_first_and_nothing_moves_afterwards(
    llama: PreTrainedModel, make_graphs: MakeEngine, monkeypatch: pytest.MonkeyPatch, drain: Drain
) -> None:
    order: list[int] = []
    capture = GraphExecutor._capture

    def recorded(self: GraphExecutor, bucket: int) -> None:
        order.append(bucket)
        capture(self, bucket)

    monkeypatch.setattr(GraphExecutor, "_capture", recorded)
    engine = make_graphs(llama)
    assert order == [4, 2, 1]
    addresses: dict[int, set[tuple[int, ...]]] = {}
    run = graphs(engine).run

    def noted(inputs: StepInputs) -> Any:
        outputs = run(inputs)
        if len(inputs.input_ids) == len(inputs.seq_lens):
            where = tuple(tensor.data_ptr() for tensor in (*inputs, *outputs))
            addresses.setdefault(len(inputs.seq_lens), set()).add(where)
        return outputs

    monkeypatch.setattr(graphs(engine), "run", noted)
    for _ in range(3):
        for index, prompt in enumerate(PROMPTS[:4]):
            engine.add_request(prompt, greedy(3 + index))
        drain(engine)
    assert {bucket: len(places) for bucket, places in addresses.items()} == {1: 1, 2: 1, 4: 1}
    assert order == [4, 2, 1]


def test_padding_changes_no_block_beyond_the_rows_own_slots(
    llama: PreTrainedModel, make_graphs: MakeEngine, hf_greedy: Greedy
) -> None:
    """Three rows in a bucket of four, while every slot that nobody may read is NaN."""
    engine = make_graphs(llama, enable_prefix_caching=False)
    cache, manager = engine.runner.cache, engine.scheduler.manager
    ids = [engine.add_request(prompt, greedy(7)) for prompt in PROMPTS[:3]]
    last: dict[str, RequestOutput] = {}
    for step in range(7):
        free = [block.block_id for block in manager.pool.free_queue.get_all_free_blocks()]
        for tensor in cache.tensors:
            tensor[free] = torch.nan
            tensor[0, 1:] = torch.nan
        before = [tensor.clone() for tensor in cache.tensors]
        last.update({output.request_id: output for output in engine.step()})
        if step in (0, 6):  # the prompts; at the end the blocks have gone back
            continue
        own = {
            (manager.block_ids(request)[position // 8], position % 8)
            for request in engine.scheduler._running.values()
            for position in range(request.num_tokens - 2, request.num_tokens + 1)  # one step ahead, or not
            if position // 8 < len(manager.block_ids(request))
        }
        for tensor, old in zip(cache.tensors, before, strict=True):
            now = tensor.clone()
            for block, slot in own:
                now[block, slot] = old[block, slot] = 0
            assert torch.equal(now[1:].nan_to_num(7.0), old[1:].nan_to_num(7.0))
            assert tensor[0, 0].isfinite().all()
            assert tensor[0, 1:].isnan().all()
    assert tokens([last[i] for i in ids]) == [hf_greedy(llama, prompt, 7) for prompt in PROMPTS[:3]]


def test_a_request_as_long_as_may_be_and_then_a_short_one(
    llama: PreTrainedModel, make_graphs: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    """Tables are as wide as the longest request; the short one must not see its columns."""
    engine = make_graphs(llama, max_model_len=61, enable_prefix_caching=False)
    assert graphs(engine).table_width == 8
    long = [(7 * i) % 200 for i in range(60)]
    engine.add_request(long, greedy(5), request_id="long")
    (output,) = drain(engine).values()
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (hf_greedy(llama, long, 1), "length")
    engine.add_request(long[:57], greedy(9), request_id="end")
    assert drain(engine)["end"].outputs[0].token_ids == hf_greedy(llama, long[:57], 4)
    engine.add_request(PROMPTS[0], greedy(6), request_id="short")
    assert drain(engine)["short"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[0], 6)
    assert engine.stats().num_graph_replays >= 3 + 5


def test_captured_at_a_short_context_and_replayed_at_a_long_one(
    family: str, tiny_model: TinyModel, make_graphs: MakeEngine
) -> None:
    engine = make_graphs(tiny_model(family), max_model_len=100)
    checks = engine.self_check()
    assert [(one.batch, one.rows, one.context) for one in checks] == [
        *((1, 1, 3), (1, 1, 100), (2, 1, 3), (2, 2, 100), (4, 3, 3), (4, 4, 100))
    ]
    for one in checks:
        assert one.replayed
        assert one.same_argmax
        assert one.max_difference <= 1e-4 * one.max_logit, str(one)
    assert "replayed" in str(checks[0])
    engine.check_integrity()


def test_self_check_finds_a_stale_graph_and_waits_for_nobody(llama: PreTrainedModel, make_graphs: MakeEngine) -> None:
    engine = make_graphs(llama)
    engine.add_request(PROMPTS[0], greedy(4))
    with pytest.raises(ValueError, match="wait until all requests have ended"):
        engine.self_check()
    while engine.has_unfinished_requests():
        engine.step()
    head = engine.model.lm_head
    head.weight = torch.nn.Parameter(head.weight * 1.01, requires_grad=False)  # the graphs still read the old one
    assert all(one.max_difference > 1e-3 * one.max_logit for one in engine.self_check())


def test_an_executor_without_buckets_is_checked_too(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    checks = make_engine(llama).self_check()
    assert [one.batch for one in checks] == [1, 1, 2, 2, 5, 5]
    assert all(one.max_difference == 0 and not one.replayed for one in checks)


@pytest.mark.parametrize(
    ("knobs", "captured", "left_out"),
    [
        (
            {"max_num_seqs": 5, "cudagraph_capture_sizes": [1, 2, 4, 8]},
            [1, 2, 4, 5],
            "5 in place of [8]: at most 5 rows, max_num_seqs",
        ),
        (
            {"max_num_seqs": 5, "cudagraph_capture_sizes": [1, 8, 16]},
            [1, 5],
            "5 in place of [8, 16]: at most 5 rows, max_num_seqs",
        ),
        (
            {"num_blocks": 4, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
            [1, 2, 3],
            "3 in place of [4, 8, 16]: at most 3 rows, the blocks of the KV cache",
        ),
        ({"max_num_seqs": 3, "cudagraph_capture_sizes": None}, [1, 2, 3], None),
    ],
    ids=str,
)
def test_buckets_that_no_batch_needs_are_left_out_and_the_rest_serves(
    knobs: dict[str, Any],
    captured: list[int],
    left_out: str | None,
    llama: PreTrainedModel,
    make_graphs: MakeEngine,
    hf_greedy: Greedy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        engine = make_graphs(llama, **knobs)
    assert graphs(engine).captured == captured
    said = [record.getMessage() for record in caplog.records if "in place of" in record.getMessage()]
    assert said == ([] if left_out is None else [f"cudagraph_capture_sizes: {left_out}"])
    outputs = engine.generate(PROMPTS[3:], greedy(4), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, prompt, 4) for prompt in PROMPTS[3:]]
    assert engine.stats().num_graph_replays == 3


def test_a_bucket_that_finds_no_memory_is_dropped_with_a_warning(
    llama: PreTrainedModel,
    make_graphs: MakeEngine,
    hf_greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for maker in (RecordedGraphs, CudaGraphs):
        capture, count = maker.capture, iter(range(100))

        def failing(self: Any, run: Any, capture: Any = capture, count: Any = count) -> Any:
            if next(count) == 0:
                try:
                    raise torch.OutOfMemoryError("no memory")
                finally:  # as the end of a broken capture does
                    raise RuntimeError("the capture was invalidated")
            return capture(self, run)

        monkeypatch.setattr(maker, "capture", failing)
    engine = make_graphs(llama)
    assert graphs(engine).captured == [1, 2]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no memory to capture the decode step of 4 rows" in said
    outputs = engine.generate(PROMPTS[:3], greedy(4), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, prompt, 4) for prompt in PROMPTS[:3]]
    assert engine.stats().num_graph_replays == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_lazy_capture_that_is_cut_off_spoils_no_inputs(
    error: type[BaseException],
    llama: PreTrainedModel,
    make_graphs: MakeEngine,
    hf_greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_graphs(llama, cuda_graphs="lazy", cudagraph_capture_sizes=[4], block_size=4)
    prompts = [PROMPTS[0][:5], PROMPTS[2][:6]]
    left = [error]

    for maker in (RecordedGraphs, CudaGraphs):

        def cut_off(self: Any, run: Any, capture: Any = maker.capture) -> Any:
            if left:
                run()
                raise left.pop()
            return capture(self, run)

        monkeypatch.setattr(maker, "capture", cut_off)
    ids = [engine.add_request(prompt, greedy(9)) for prompt in prompts]
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        try:
            last.update({output.request_id: output for output in engine.step()})
        except error:
            continue
    assert not left
    assert tokens([last[i] for i in ids]) == [hf_greedy(llama, prompt, 9) for prompt in prompts]


def test_other_errors_of_a_capture_are_raised(
    llama: PreTrainedModel, make_graphs: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, run: Any) -> Any:
        raise RuntimeError("an operation is not permitted when a stream is capturing")

    for maker in (RecordedGraphs, CudaGraphs):
        monkeypatch.setattr(maker, "capture", failing)
    with pytest.raises(RuntimeError, match="not permitted"):
        make_graphs(llama)


@pytest.mark.parametrize("ahead", [False, True])
def test_lazy_graphs_are_captured_between_steps_once_missed(
    ahead: bool, llama: PreTrainedModel, make_graphs: MakeEngine, hf_greedy: Greedy
) -> None:
    engine = make_graphs(llama, cuda_graphs="lazy", async_scheduling=ahead)
    assert graphs(engine).captured == []
    outputs = engine.generate(PROMPTS[:3], greedy(6), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, prompt, 6) for prompt in PROMPTS[:3]]
    assert graphs(engine).captured == [4]
    assert engine.stats().num_graph_replays == 4  # but for the prompts and the first decode step
    outputs = engine.generate(PROMPTS[:1], greedy(6), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, PROMPTS[0], 6)]
    assert graphs(engine).captured == [1, 4]


def test_more_masked_ids_than_graphs_have_room_for_run_uncaptured(
    llama: PreTrainedModel, make_graphs: MakeEngine
) -> None:
    engine, plain = make_graphs(llama), make_graphs(llama, cuda_graphs=False)
    replays = []
    for count in (MASKED, MASKED + 1):
        params = SamplingParams(
            max_tokens=9, temperature=1.0, seed=1, min_tokens=5, stop_token_ids=list(range(0, 20 * count, 20))
        )
        (output,) = engine.generate([PROMPTS[0]], params, progress=False)
        assert tokens([output]) == tokens(plain.generate([PROMPTS[0]], params, progress=False))
        assert not set(output.outputs[0].token_ids[:4]) & set(params.stop_token_ids)
        replays.append(engine.stats().num_graph_replays)
    assert replays[0] > 0
    assert replays[1] > replays[0]  # from the minimum on nothing is masked


def test_rows_of_any_parameters_share_a_graph(llama: PreTrainedModel, make_graphs: MakeEngine, drain: Drain) -> None:
    """Draws, masks, completions and beams; a finished row leaves nothing behind for the one that takes its place."""
    many: list[SamplingParams | BeamSearchParams] = [
        greedy(12),
        SamplingParams(max_tokens=5, temperature=1.0, top_k=5, seed=1, min_tokens=4, stop_token_ids=list(range(5))),
        SamplingParams(max_tokens=9, temperature=1.3, top_p=0.8, min_p=0.05, seed=2),
        SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=2),
        BeamSearchParams(beam_width=2, max_tokens=5),
        greedy(3),
    ]
    found = []
    for knobs in ({}, {"cuda_graphs": False, "async_scheduling": False}):
        engine = make_graphs(llama, max_num_seqs=4, **knobs)
        for index, params in enumerate(many):
            engine.add_request(PROMPTS[index % 5], params, request_id=str(index))
        outputs = drain(engine)
        found.append({i: [one.token_ids for one in output.outputs] for i, output in outputs.items()})
    assert found[0] == found[1]


def test_new_weights_are_captured(
    llama: PreTrainedModel, tiny_model: TinyModel, make_graphs: MakeEngine, hf_greedy: Greedy
) -> None:
    engine = make_graphs(llama)
    wider = {name: tensor * 1.5 for name, tensor in llama.state_dict().items()}
    before = engine.generate([PROMPTS[0]], greedy(6), progress=False)
    engine.load_weights(wider)
    changed = engine.generate([PROMPTS[0]], greedy(6), progress=False)
    assert tokens(changed) != tokens(before)
    assert graphs(engine).nbytes > 0 or engine.device.type == "cuda"  # a driver's figures may stay as they are
    assert all(one.max_difference <= 1e-4 * one.max_logit for one in engine.self_check())
    engine.load_weights(llama.state_dict())
    assert tokens(engine.generate([PROMPTS[0]], greedy(6), progress=False)) == [hf_greedy(llama, PROMPTS[0], 6)]


def test_debug_names_an_input_that_moved(llama: PreTrainedModel, make_graphs: MakeEngine) -> None:
    engine = make_graphs(llama)
    executor = graphs(engine)
    fill_padding(executor.arena.carve(executor.sizes(2)))
    inputs = executor.arena.upload()
    executor.run(inputs)
    with pytest.raises(AssertionError, match=r"positions of bucket 2 lies at .* and was captured at"):
        executor.run(inputs._replace(positions=inputs.positions.clone()))


def test_graphs_take_memory_that_the_report_names(llama: PreTrainedModel, make_graphs: MakeEngine) -> None:
    engine = make_graphs(llama)
    assert engine.memory_report().graphs == graphs(engine).nbytes
    assert graphs(engine).nbytes > 0 or engine.device.type == "cuda"
    measured = graphs(engine).measure()
    assert measured >= 0
    assert graphs(engine).captured == []


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"cuda_graphs": "eager"}, "cuda_graphs must be None, True, False or 'lazy', not 'eager'"),
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes must be None or a list of batch sizes"),
        ({"cudagraph_capture_sizes": [0, 2]}, "cudagraph_capture_sizes must be None or a list of batch sizes"),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes must be None or a list of batch sizes"),
        ({"async_scheduling": "yes"}, "async_scheduling must be None, True or False, not 'yes'"),
        ({"debug": 1}, "debug must be True or False, not 1"),
        ({"cuda_graphs": True, "backend": "inductor", "device": "cpu"}, "needs a CUDA device"),
    ],
    ids=str,
)
def test_knobs_are_checked(
    knobs: dict[str, Any], message: str, llama: PreTrainedModel, make_engine: MakeEngine
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(llama, **knobs)


@pytest.mark.parametrize("knobs", [{"cuda_graphs": False}, {"device": "cpu"}], ids=str)
def test_sizes_without_graphs_are_ignored_with_a_warning(
    knobs: dict[str, Any], llama: PreTrainedModel, make_engine: MakeEngine
) -> None:
    with pytest.warns(UserWarning, match=r"cudagraph_capture_sizes=\[1\] is ignored: no graphs are captured"):
        make_engine(llama, cudagraph_capture_sizes=[1], **knobs)


def test_a_step_that_reads_on_the_host_runs_uncaptured(
    llama: PreTrainedModel,
    make_graphs: MakeEngine,
    hf_greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward = AdaptedModel.forward

    def reading(self: AdaptedModel, *args: Any) -> Any:
        outputs = forward(self, *args)
        assert outputs.tokens[0].item() >= 0
        return outputs

    monkeypatch.setattr(AdaptedModel, "forward", reading)
    engine = make_graphs(llama)
    assert graphs(engine).captured == []
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("decode steps run uncaptured: ")
    outputs = engine.generate(PROMPTS[:3], greedy(4), progress=False)
    assert tokens(outputs) == [hf_greedy(llama, prompt, 4) for prompt in PROMPTS[:3]]
    assert engine.stats().num_graph_replays == 0


def test_new_weights_that_find_no_memory_for_graphs_run_without(
    llama: PreTrainedModel, make_graphs: MakeEngine, hf_greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_graphs(llama)
    engine.add_request(PROMPTS[0], greedy(6), request_id="a")
    engine.step()

    def failing(self: Any, run: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    for maker in (RecordedGraphs, CudaGraphs):
        monkeypatch.setattr(maker, "capture", failing)
    engine.load_weights(llama.state_dict())
    assert graphs(engine).captured == []
    last = None
    while engine.has_unfinished_requests():
        (last,) = engine.step() or (last,)
    assert last is not None
    assert tokens([last]) == [hf_greedy(llama, PROMPTS[0], 6)]


@pytest.mark.cuda
def test_replays_allocate_nothing_on_the_device(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    engine = make_engine(llama, device="cuda", block_size=8, cudagraph_capture_sizes=[1, 2, 4])
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, greedy(30))
    for _ in range(5):
        engine.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(15):
        engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
