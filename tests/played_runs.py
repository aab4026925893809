"""Events of runs of every kind, by those who play them from the definitions."""

from hypothesis import strategies as st
from reference_drafts import drafted_workloads, play_drafts
from reference_paged import paged_workloads, play_paged
from reference_schedule import play, workloads
from reference_units import play_units, unit_workloads

PLAYED = st.one_of(
    st.tuples(workloads(), st.integers(1, 5)).map(lambda drawn: play(*drawn).events),
    paged_workloads().map(lambda drawn: play_paged(*drawn).events),
    st.tuples(unit_workloads(), st.integers(0, 99)).map(lambda d: play_units(*d[0], d[1]).events),
    drafted_workloads().map(lambda drawn: play_drafts(*drawn).events),
)
