"""Random trees of drafts, by the plainest means: each draft has its parent, or -1 for none."""


def random_parents(random, num_drafts):
    if random.random() < 0.5:
        return [*range(-1, num_drafts - 1)]
    return [random.randint(-1, number - 1) for number in range(num_drafts)]


def way_to(draft, parents):
    return [] if draft < 0 else [*way_to(parents[draft], parents), draft]


def is_line(parents):
    return parents == [*range(-1, len(parents) - 1)]


def lines_of(proposal):
    parents = [parent - 1 for parent in proposal.parents or range(len(proposal))]
    return [
        [proposal.tokens[number] for number in way_to(draft, parents)]
        for draft in range(len(proposal))
    ]
