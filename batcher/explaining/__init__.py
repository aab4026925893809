"""Why a run went as it did, from its events alone: what each request met, and how two runs part."""
