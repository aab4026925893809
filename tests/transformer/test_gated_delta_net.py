"""A gated delta net is its definition, and the same to the bit however its tokens are cut.

States are told apart by their cells alone: what is in one is of whoever wrote it last.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from batcher.errors import InvariantError
from batcher.transformer.config import DeltaNetSettings
from batcher.transformer.layers import NOWHERE
from batcher.transformer.step import KVStore, RecurrentStates, Snapshot, Span, Step
from batcher.transformer.transformer import GatedDeltaNet

LENGTH = 30
NUM_CELLS = 6


def net_of(*sizes):
    """Return one with random weights; sizes: heads and their sizes of keys and values, kernel."""
    key_heads, value_heads, key_dim, value_dim, kernel = sizes
    settings = DeltaNetSettings((0,), key_heads, value_heads, key_dim, value_dim, kernel)
    draw = np.random.default_rng(sizes)

    def drawn(*shape):
        return draw.standard_normal(shape, np.float32) * np.float32(0.3)

    heads = (key_heads, value_heads // key_heads)
    return GatedDeltaNet(
        cache=0,
        settings=settings,
        eps=1e-5,
        convolution=drawn(kernel, settings.num_channels) * 3,
        fading=np.exp(drawn(*heads) - 3),
        fading_bias=drawn(*heads),
        norm=1 + drawn(value_dim),
    )


NETS = [net_of(2, 4, 8, 6, 4), net_of(3, 3, 5, 7, 2), net_of(1, 3, 16, 8, 6), net_of(1, 1, 1, 1, 1)]


def inputs_of(net):
    """Return rows of three sequences: what is projected to queries and so on, then the rest."""
    sizes = net.settings
    width = sizes.num_channels + sizes.value_size + 2 * sizes.num_value_heads
    draw = np.random.default_rng(width)
    return [draw.standard_normal((LENGTH, width), np.float32) for _ in range(3)]


INPUTS = [inputs_of(net) for net in NETS]


def states_of(net):
    """Return cells full of NaN, but for NOWHERE."""
    states = RecurrentStates(net.settings)
    states.make_room(NUM_CELLS)
    for store in (*states.convolution, *states.delta):
        store[NOWHERE + 1 :] = np.nan
    return states


def computed(net, states, spans, x):
    """Return the output of each span of a step, whose inputs are x."""
    rows, num_ba = np.concatenate(x), 2 * net.settings.num_value_heads
    step = Step(spans, KVStore(0, 1, 1), states)
    output = net(step, rows[:, :-num_ba], rows[:, -num_ba:])
    return np.split(output, np.cumsum([len(part) for part in x])[:-1])


def span(start, num_tokens, source, *snapshots):
    kept = [Snapshot(*snapshot) for snapshot in snapshots]
    return Span([0] * num_tokens, start, [], source, kept)


def whole(net, x):
    return computed(net, states_of(net), [span(0, len(x), NOWHERE, (len(x), 1))], [x])[0]


WHOLE = [[whole(net, x) for x in own] for net, own in zip(NETS, INPUTS, strict=True)]


@pytest.mark.parametrize("number", range(len(NETS)))
def test_a_gated_delta_net_is_its_definition(number):
    for x, found in zip(INPUTS[number], WHOLE[number], strict=True):
        expected = delta_net_by_definition(NETS[number], x)
        assert np.abs(expected).max() > 0.1
        assert_allclose(found, expected, atol=2e-4)


@given(st.integers(0, len(NETS) - 1), st.data())
def test_whoever_goes_on_from_a_cell_finds_what_was_left_there(number, data):
    net, states = NETS[number], states_of(NETS[number])
    states.num_computed_together = data.draw(st.sampled_from([1, 2, 100]))
    content = {NOWHERE: (0, 0)}  # cell -> the sequence that is in it, and how many of its tokens
    for _ in range(data.draw(st.integers(1, 6))):
        spans, x, expected = [], [], []
        for _ in range(data.draw(st.integers(1, 6))):
            source = data.draw(st.sampled_from(sorted(content)))
            sequence, start = content[source]
            if source == NOWHERE:
                sequence = data.draw(st.integers(0, len(INPUTS[number]) - 1))
            if start == LENGTH:
                continue
            most = data.draw(st.sampled_from([1, LENGTH]))
            num_tokens = data.draw(st.integers(1, min(most, LENGTH - start)))
            times = data.draw(st.sets(st.integers(1, num_tokens), max_size=3)) | {num_tokens}
            cells = data.draw(st.permutations(range(1, NUM_CELLS + 1)))
            kept = [*zip(sorted(times), cells, strict=False)]
            content |= {cell: (sequence, start + num) for num, cell in kept}
            spans.append(span(start, num_tokens, source, *kept))
            x.append(INPUTS[number][sequence][start : start + num_tokens])
            expected.append(WHOLE[number][sequence][start : start + num_tokens])
        if spans:
            for found, part in zip(computed(net, states, spans, x), expected, strict=True):
                assert np.array_equal(found, part)


def test_spans_between_which_nothing_passes_are_computed_together():
    rows = [span(5, 1, cell, (1, cell)) for cell in range(1, NUM_CELLS + 1)]
    states = states_of(NETS[0])
    step = Step([*rows[:3], span(0, 9, NOWHERE, (4, 5), (9, 6)), rows[3]], KVStore(0, 1, 1), states)
    [wave] = step.waves
    assert wave.rows.tolist() == [3, 0, 1, 2, 12, *range(4, 12)]
    assert wave.sources.tolist() == [NOWHERE, 1, 2, 3, 4]
    follower = span(9, 2, 6, (2, 6))
    step = Step([span(0, 9, NOWHERE, (9, 6)), rows[0], follower, rows[1]], KVStore(0, 1, 1), states)
    assert [wave.rows.tolist() for wave in step.waves] == [[0, 9, *range(1, 9)], [10, 12, 11]]
    states.num_computed_together = 2
    step = Step(rows[:5], KVStore(0, 1, 1), states)
    assert [wave.rows.tolist() for wave in step.waves] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    "kept", [[], [(2, 1)], [(2, 1), (3, NOWHERE)], [(0, 2), (3, 1)], [(2, 2), (2, 3), (3, 1)]]
)
def test_a_span_keeps_its_last_states_in_a_cell_of_its_own(kept):
    with pytest.raises(InvariantError, match="a span of 3 tokens keeps"):
        Step([span(0, 3, NOWHERE, *kept)], KVStore(0, 1, 1), states_of(NETS[0]))


def test_cells_keep_their_states_and_a_step_needs_some():
    net = NETS[0]
    states = states_of(net)
    computed(net, states, [span(0, 7, NOWHERE, (7, 2))], [INPUTS[0][0][:7]])
    states.make_room(50)
    assert states.num_cells == 51
    states.make_room(3)
    states.copy(2, 40)
    found = computed(net, states, [span(7, 4, 40, (4, 40))], [INPUTS[0][0][7:11]])
    assert np.array_equal(found[0], WHOLE[0][0][7:11])
    assert not states.delta[0][NOWHERE].any()
    assert not states.convolution[0][NOWHERE].any()
    with pytest.raises(InvariantError, match="no cells for their states"):
        NETS[0](Step([span(0, LENGTH, NOWHERE)], KVStore(0, 1, 1), None), *INPUTS[0][:2])


# A gated delta net by its definition: token by token and head by head, in float64.


def delta_net_by_definition(net, x):
    """Return the output [tokens, value_size] of rows of one sequence."""
    sizes = net.settings
    group = sizes.num_value_heads // sizes.num_key_heads
    channels, betas, decays, gates = [], [], [], []
    for row in x.astype(np.float64):
        qkvz, ba = np.split(row, [-2 * sizes.num_value_heads])
        queries, keys, values, gate, beta, decay = [], [], [], [], [], []
        for head, (wide, narrow) in enumerate(
            zip(np.split(qkvz, sizes.num_key_heads), np.split(ba, sizes.num_key_heads), strict=True)
        ):
            ends = np.cumsum([sizes.key_head_dim] * 2 + [group * sizes.value_head_dim])
            query, key, value, z = np.split(wide, ends)
            queries.append(query)
            keys.append(key)
            values.append(value)
            gate += np.split(z, group)
            for number in range(group):
                beta.append(1 / (1 + np.exp(-narrow[number])))
                inner = narrow[group + number] + net.fading_bias[head, number]
                decay.append(np.exp(-float(net.fading[head, number]) * np.log1p(np.exp(inner))))
        channels.append(np.concatenate([*queries, *keys, *values]))
        betas.append(beta)
        decays.append(decay)
        gates.append(gate)
    shape = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
    memories = np.zeros(shape)
    rows = []
    for token in range(len(x)):
        mixed = np.zeros(sizes.num_channels)
        for back in range(min(sizes.kernel_size, token + 1)):
            mixed += channels[token - back] * net.convolution[-1 - back]
        mixed *= 1 / (1 + np.exp(-mixed))
        queries, keys, values = np.split(mixed, [sizes.key_size, 2 * sizes.key_size])
        row = []
        for head in range(sizes.num_value_heads):
            query = _unit(np.split(queries, sizes.num_key_heads)[head // group])
            key = _unit(np.split(keys, sizes.num_key_heads)[head // group])
            value = np.split(values, sizes.num_value_heads)[head]
            memory = memories[head]
            memory *= decays[token][head]
            memory += np.outer(key, (value - memory.T @ key) * betas[token][head])
            recalled = memory.T @ query / np.sqrt(sizes.key_head_dim)
            recalled /= np.sqrt((recalled**2).mean() + net.eps)
            gate = gates[token][head]
            row.append(recalled * net.norm * gate / (1 + np.exp(-gate)))
        rows.append(np.concatenate(row))
    return np.array(rows, np.float32)


def _unit(x):
    return x / np.sqrt((x**2).sum() + 1e-6)
