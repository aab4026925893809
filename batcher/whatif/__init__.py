"""What if: one workload under many settings, which of them bind, and which are enough."""
