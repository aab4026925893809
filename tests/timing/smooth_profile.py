"""A profile of terms alone, none of them 0, as a fit to steps yields it."""

from batcher.timing.profiles import Profile

SMOOTH = Profile(
    t0=9.159, w=7.703, f=0.08291, g=0.04227, d=1.509e-4, h=2.022e-4, e=5.789e-6, hardware="rtx-4090"
)
