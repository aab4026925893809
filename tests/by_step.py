"""What a timeline says of stretches of steps, step by step."""


def by_step(stretches):
    return [num for start, stop, num in stretches for _ in range(start, stop)]
