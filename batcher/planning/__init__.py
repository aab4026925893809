"""Plan without a model: simulate engines and fleets, compare settings, replay workloads."""
