"""Groups of layers that share blocks, and how many blocks they take."""

from tiny import KINDS, tiny_config, tiny_model

from batcher.models.base import Batch, Chunk
from batcher.transformer.config import DeltaNetSettings
from batcher.transformer.kv_store import OWN_BLOCK_SIZE, cache_groups


def test_blocks_of_slots_behind_a_window_are_used_again() -> None:
    model = tiny_model(**KINDS["gemma3"])
    model.allocate(1)
    for start in range(0, 320, 40):
        batch = Batch(1)
        batch.join(Chunk(0, [5] * 40, start))
        model.forward(batch)
    # a full group has 5 blocks of 64 by then, one with a window of 20 two at most
    assert OWN_BLOCK_SIZE == 64
    assert model._own.num_blocks == 7


def test_groups_have_as_many_layers_as_the_fewest_that_read_the_same() -> None:
    gemma = tiny_config(num_layers=26, sliding_window=20, full_layers=(5, 11, 17, 23))
    assert [(len(group.layers), group.window) for group in cache_groups(gemma)] == [
        (4, None),
        *[(4, 20)] * 5,
        (2, 20),
    ]
    mistral = tiny_config(num_layers=8, sliding_window=20)
    assert [(len(group.layers), group.window) for group in cache_groups(mistral)] == [(8, 20)]
    roomy = tiny_config(num_layers=8, sliding_window=512)  # of a context of 512
    assert [(len(group.layers), group.window) for group in cache_groups(roomy)] == [(8, None)]
    delta_net = DeltaNetSettings(
        layers=(0, 1, 2, 4, 5, 6),
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=12,
        value_head_dim=8,
        kernel_size=4,
    )
    hybrid = cache_groups(tiny_config(num_layers=8, delta_net=delta_net))
    assert [(group.layers, group.window) for group in hybrid] == [
        ((3, 7), None),
        (delta_net.layers, 2),
    ]
