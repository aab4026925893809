"""Drafts that are a tree: where its nodes stand, and what is moved when a path is accepted.

Of several tokens that may come next, each with what may come after it, one call verifies all; see
Miao et al., "SpecInfer" (2024).  A node is the index of a draft in the tokens of its chunk.
"""

from collections.abc import Sequence

from batcher.models.base import Chunk, Pages


def node_paths(chunk: Chunk) -> list[list[int]]:
    """Return for each draft of a chunk the nodes from the first on its way to itself."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    paths: dict[int, list[int]] = {root: []}
    for node, parent in enumerate(draft_parents(chunk), root + 1):
        paths[node] = [*paths[parent], node]
    del paths[root]
    return [*paths.values()]


def draft_parents(chunk: Chunk) -> Sequence[int]:
    """Return for each draft of a chunk the index in its tokens of the one that it follows."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    return chunk.draft_parents or range(root, root + chunk.num_drafts)


def moves_along(path: Sequence[int], chunk: Chunk, pages: Pages) -> list[tuple[int, int]]:
    """Return what is to be moved when the nodes of a path are accepted: see Pages.moves.

    path: nodes of the tree of `chunk`, from its first on.
    pages: as they were when the chunk was computed.
    """
    size, first = pages.block_size, len(chunk.token_ids) - chunk.num_drafts
    tables = [pages.tables[chunk.slot], *(tables[chunk.slot] for tables in pages.group_tables)]

    def cells(index: int) -> list[int]:
        place, offset = divmod(chunk.start + index, size)
        return [table[place] * size + offset for table in tables]

    return [
        move
        for index, node in enumerate(path, first)
        if node != index
        for move in zip(cells(node), cells(index), strict=True)
    ]
