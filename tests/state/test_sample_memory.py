"""What is remembered of each sample: by id, the same on all ranks, growing if it may."""

from __future__ import annotations

import io
import math
import random

import pytest
import torch
import torch.distributed as dist

from halfway.state import sample_memory as memories
from halfway.state.ranks import Ranks
from halfway.state.sample_memory import SampleMemory

from ..helpers import processes

NAN = float("nan")


def same(a, b):
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def column(*values):
    return torch.tensor(values).unsqueeze(1)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ------------------------------------------------------------------------------------------- reading and writing


@pytest.mark.parametrize("num_samples", [None, 10])
@pytest.mark.parametrize("unknown", [NAN, 0.0, -1.0])
def test_what_is_written_is_read_and_the_rest_is_unknown(num_samples, unknown):
    memory = SampleMemory(2, num_samples, unknown)
    nothing = torch.full((3, 2), unknown)
    assert same(memory.read(torch.tensor([9, 0, 3])), nothing)
    memory.write(torch.tensor([3, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = memory.read(torch.tensor([1, 9, 3, 1]))
    assert same(found, torch.tensor([[3.0, 4.0], [unknown, unknown], [1.0, 2.0], [3.0, 4.0]]))
    memory.write(torch.tensor([1]), torch.tensor([[5.0, 6.0]]))
    assert memory.read(torch.tensor([1, 3])).tolist() == [[5.0, 6.0], [1.0, 2.0]]


@pytest.mark.parametrize("num_samples", [None, 12])
def test_random_reads_and_writes_against_a_dictionary(num_samples):
    numbers = random.Random(0)
    memory, reference = SampleMemory(1, num_samples), {}
    for _ in range(200):
        ids = [numbers.randrange(12) for _ in range(numbers.randrange(6))]
        if numbers.random() < 0.5:
            values = [numbers.choice([1.0, 2.0, 3.0, NAN, math.inf]) for _ in ids]
            memory.write(torch.tensor(ids, dtype=torch.int64), torch.tensor(values))
            for id, value in zip(ids, values, strict=True):
                reference[id] = value if math.isfinite(value) else NAN
        else:
            expected = torch.tensor([reference.get(id, NAN) for id in ids]).reshape(-1, 1)
            assert same(memory.read(torch.tensor(ids, dtype=torch.int64)), expected)


def test_of_an_id_that_occurs_twice_the_later_row_counts():
    memory = SampleMemory(1, 5)
    memory.write(torch.tensor([2, 4, 2, 0, 2, 4]), torch.arange(6.0))
    assert same(memory.values, column(3.0, NAN, 4.0, NAN, 5.0))


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_what_is_not_finite_is_unknown(bad):
    memory = SampleMemory(2, 3, unknown=-7.0)
    memory.write(torch.tensor([0, 1]), torch.tensor([[1.0, bad], [bad, 2.0]]))
    assert memory.values.tolist() == [[1.0, -7.0], [-7.0, 2.0], [-7.0, -7.0]]


def test_gradients_and_half_precision_are_left_behind():
    memory = SampleMemory(1, 3)
    memory.write(torch.tensor([1], dtype=torch.int32), torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True))
    assert memory.values.dtype == torch.float32
    assert not memory.values.requires_grad
    assert memory.read(torch.tensor([1], dtype=torch.uint8)).item() == 1.5


# ----------------------------------------------------------------------------------------------- size and range


def test_it_grows_with_the_ids_that_are_written_and_not_with_those_that_are_read():
    memory = SampleMemory()
    assert len(memory) == 0
    assert memory.read(torch.tensor([50])).isnan().all()
    assert len(memory) == 0
    memory.write(torch.tensor([4]), torch.tensor([1.0]))
    assert len(memory) == 5
    assert memory.read(torch.tensor([1000, 4])).nan_to_num(0).tolist() == [[0.0], [1.0]]
    assert len(memory) == 5
    for id in range(5, 1000):
        memory.write(torch.tensor([id]), torch.tensor([float(id)]))
    assert len(memory) < 2000  # doubled now and then, not copied at every new id
    assert memory.read(torch.arange(1000)).squeeze(1)[4:].tolist() == [1.0, *map(float, range(5, 1000))]


@pytest.mark.parametrize("use", ["read", "write"])
def test_an_id_out_of_range_names_itself_and_the_fix(use):
    for num_samples, id, range_ in ((10, 10, "0 to 9"), (10, -1, "0 to 9"), (None, -3, "0 on")):
        memory = SampleMemory(1, num_samples)
        memory.write(torch.tensor([0]), torch.tensor([1.0]))
        with pytest.raises(ValueError, match=rf"the id {id}: .* {range_}.*WithIds"):
            memory.read(torch.tensor([0, id])) if use == "read" else memory.write(torch.tensor([id]), torch.ones(1))
        assert memory.read(torch.tensor([0])).item() == 1.0


def test_ids_that_are_hashes_do_not_fill_the_machine():
    with pytest.raises(ValueError, match="position in the data set"):
        SampleMemory().write(torch.tensor([10**15]), torch.ones(1))


@pytest.mark.parametrize("ids", [torch.tensor([0.5]), torch.tensor([True])])
def test_ids_must_be_whole_numbers(ids):
    for use in (lambda m: m.read(ids), lambda m: m.write(ids, torch.ones(1))):
        with pytest.raises(TypeError, match="whole numbers"):
            use(SampleMemory(1, 3))


def test_an_id_out_of_range_on_the_device_is_reported_by_check(monkeypatch):
    """Nothing waits for the device meanwhile, and no memory is touched that is not ours."""
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    memory = SampleMemory(1, 4)
    memory.write(torch.tensor([1]), torch.ones(1))
    memory.check()
    memory.read(torch.tensor([1, 4]))
    memory.read(torch.tensor([1]))
    with pytest.raises(ValueError, match="out of range"):
        memory.check()
    memory.check()  # said once
    memory.write(torch.tensor([-1]), torch.ones(1))
    with pytest.raises(ValueError, match="out of range"):
        memory.check()


def test_sizes_are_checked():
    for settings in ({"width": 0}, {"num_samples": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            SampleMemory(**settings)


# --------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("num_samples", [None, 6])
def test_the_state_travels_and_is_not_shared(num_samples):
    first, second = SampleMemory(2, num_samples), SampleMemory(2, num_samples)
    first.write(torch.tensor([1, 5]), torch.tensor([[1.0, 2.0], [3.0, NAN]]))
    second.load_state_dict(through_a_file(first.state_dict()))
    assert same(first.values, second.values)
    third = SampleMemory(2, num_samples)
    third.load_state_dict(second.state_dict())
    second.write(torch.tensor([1]), torch.zeros(1, 2))
    assert third.read(torch.tensor([1])).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "2 numbers per sample"),
        (None, "2 numbers per sample"),
        ({"values": torch.zeros(6)}, "2 numbers per sample"),
        ({"values": torch.zeros(6, 3)}, "2 numbers per sample"),
        ({"values": torch.zeros(5, 2)}, "remembers 5 samples, here are 6"),
    ],
)
def test_the_state_of_another_memory_is_refused(state, words):
    memory = SampleMemory(2, 6)
    with pytest.raises(ValueError, match=words):
        memory.load_state_dict(state)
    assert memory.values.shape == (6, 2)


# --------------------------------------------------------------------------------------------------- several ranks


def remember(rank, num_samples, sizes):
    """Every rank writes ids of its own, some of them also another's; the second rank has one batch less."""
    ranks, memory = Ranks(), SampleMemory(2, num_samples)
    history = []
    for step in range(4):
        source = torch.Generator().manual_seed(100 * step + rank)
        if rank == 1 and step == 3:
            assert ranks.send_nothing()
        else:
            size = sizes[rank] - (step == 2)  # a last, smaller batch
            ids = torch.randint(20, (size,), generator=source)
            ids[0] = 7  # on every rank, and
            ids[-1] = ids[1]  # twice on this one
            memory.read(ids)
            values = torch.randn(size - 2, 2, generator=source)
            values[-1, 0] = NAN
            memory.write(ids[2:], values, ranks, batch_size=size)
            history.append((step, rank, ids[2:], values))
    return memory.values, history, len(memory)


@pytest.mark.parametrize("num_samples", [None, 20])
@pytest.mark.parametrize("sizes", [(6, 6), (9, 4)])
def test_ranks_remember_the_same_and_the_later_row_counts(num_samples, sizes):
    found = processes.run(2, remember, num_samples, sizes)
    (first, *_), (second, *_) = found
    assert same(first, second)
    expected = torch.full_like(first, NAN)
    for _, _, ids, values in sorted(found[0][1] + found[1][1], key=lambda entry: entry[:2]):
        for id, value in zip(ids.tolist(), values, strict=True):
            expected[id] = value
    assert same(first, expected)


def meet(rank):
    """What the higher rank says of a sample both have seen counts, however many rows the message has left free."""
    ranks, memory = Ranks(), SampleMemory(1, 10)
    memory.write(torch.tensor([5, 5] if rank == 0 else [5]), torch.tensor([1.0, 2.0] if rank == 0 else [3.0]), ranks, 8)
    first = memory.read(torch.tensor([5])).item()
    memory.write(torch.tensor([4, 4] if rank == 0 else []).long(), torch.arange(2.0)[: 2 - 2 * rank], ranks, 8)
    second = memory.read(torch.tensor([4, 5])).squeeze(1).tolist()
    assert ranks.send_nothing()
    unused = memory.values[:4].isnan().all().item()
    try:
        memory.write(torch.tensor([2 if rank == 0 else 10]), torch.ones(1), ranks, 8)
        memory.settle()
    except ValueError as error:
        return first, second, unused, str(error)
    return first, second, unused, ""


def test_free_rows_of_a_message_change_nothing_and_errors_reach_all_ranks():
    for first, second, unused, error in processes.run(2, meet):
        assert first == 3.0
        assert second == [1.0, 3.0]
        assert unused
        assert "the id 10" in error


# The sizes of the batches of two ranks, step by step: longer ones come on one rank alone, then on the other.
UNEVEN = [(3, 3), (31, 3), (3, 3), (2, 60), (2, 3), (7, 1), (0, 2), (1, 1), (1, 1), (1, 1), (1, 1)]


def overflow(rank, num_samples):
    ranks, memory = Ranks(timeout=20), SampleMemory(2, num_samples)
    written = {}
    for step, sizes in enumerate(UNEVEN):
        # Ids of its own, so that it does not matter in which message they come.
        ids = torch.arange(sizes[rank]) * 2 + rank
        values = torch.full((len(ids), 2), float(step))
        memory.write(ids, values, ranks, batch_size=len(ids))
        written.update(dict.fromkeys(ids.tolist(), float(step)))
        if step == 2:
            early = memory.values.clone()
    return memory.values, written, early


@pytest.mark.parametrize("num_samples", [None, 120])
def test_batches_that_outgrow_the_messages_on_one_rank_come_later_and_whole(num_samples):
    found = processes.run(2, overflow, num_samples)
    (first, written, early), (second, others, _) = found
    assert same(first, second)
    expected = torch.full_like(first, NAN)
    for id, step in {**written, **others}.items():
        expected[id] = step
    assert same(first, expected)
    known = ~early[:, 0].isnan()
    assert known.sum() < 34, "of 31 + 3 samples some must have waited, or this tests nothing"


def waiting(rank, sizes):
    """The same samples come in all batches, fewer in small ones, each time with a newer value."""
    ranks, memory = Ranks(timeout=20), SampleMemory(1, 200)
    late = []
    for step, size in enumerate(sizes):
        ids = torch.arange(100 - size, 100) + 100 * rank
        memory.write(ids, torch.full((size,), float(step)), ranks)
        late.append(len(memory._late))
    return late, memory.values.view(2, 100)


def test_what_had_no_room_soon_has_it():
    for late, values in processes.run(2, waiting, [10, *[100] * 7]):
        assert late[1] > 0
        assert late[5:] == [0, 0, 0]
        assert (values == 7).all()


def test_what_had_no_room_does_not_replace_what_is_newer():
    for late, values in processes.run(2, waiting, [10, 100, 1, 0, 0, 0]):
        assert late[2] > 0
        assert late[-1] == 0
        assert (values[:, :99] == 1).all()
        assert (values[:, 99] == 2).all()


def reloaded(rank):
    """A state is loaded while rows wait for room."""
    ranks, memory = Ranks(timeout=20), SampleMemory(1, 100)
    memory.write(torch.tensor([rank]), torch.ones(1), ranks, 1)
    state = {"values": memory.values.clone()}
    memory.write(torch.arange(60), torch.full((60,), 9.0), ranks, 60)
    memory.load_state_dict(state)
    for _ in range(5):
        memory.write(torch.tensor([rank]), torch.full((1,), 2.0), ranks, 1)
    return memory.values.squeeze(1).tolist()


def test_what_waits_for_room_belongs_to_the_run_that_a_state_replaces():
    for values in processes.run(2, reloaded):
        assert values[:2] == [2.0, 2.0]
        assert all(math.isnan(value) for value in values[2:])


def never(rank):
    ranks, memory = Ranks(timeout=5), SampleMemory()
    waited = ranks.send_nothing()  # nothing was ever written: nothing waits
    dist.barrier()  # a rank that ends while another still connects to it would be an error there
    return waited, len(memory)


def test_what_never_wrote_sends_nothing_for_a_rank_without_batches():
    assert processes.run(2, never) == [(False, 0), (False, 0)]
    assert not Ranks().send_nothing()
