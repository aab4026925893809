"""Which sequence gets which slot, when: the clock, the slots and the waiting queue."""
