"""What `compare` and `plan` say where more arrives than is served."""

import json

from process import batchdecode


def test_plan_and_compare_say_so():
    command = ("--slo", "e2e=300", "--profile", "constant:1")
    workload = "synthetic:rate=1,duration=400,prompt=1,output=2,burstiness=constant"
    done = batchdecode("plan", workload, *command, "--goodput", "0.5")
    told = "served 0.501 requests/s of 1 offered, so the queue grows and a longer run is worse"
    words = " ".join(done.stdout.decode().split())
    assert "batch 1 is the smallest" in words
    assert f"load {told}" in words
    done = batchdecode("compare", workload, *command, "--batch", "1,2")
    assert done.stdout.decode().splitlines()[-1] == f"batch 1: {told}"
    done = batchdecode("compare", workload, *command, "--batch", "1", "--json")
    backlog = json.loads(done.stdout)["outcome"]["backlog"]
    assert backlog == {"offered_per_s": 1.002506, "served_per_s": 0.501253, "is_short": False}


def test_of_many_cells_the_first_is_told():
    workload = "synthetic:rate=4,duration=400,prompt=1,output=16,burstiness=constant"
    done = batchdecode("compare", workload, "--batch", "1,2,3,4,5,6,7,8")
    lines = done.stdout.decode().splitlines()
    assert [line.startswith("batch 1: served ") for line in lines[-2:]] == [False, True]
    assert lines[-1].endswith("; the same in 7 others: see backlog of --json")
