"""A model in a module of a user: slow, killed by a request or by all, interrupting."""

MODEL = """
import os, time

def sleepy(prefixes):
    time.sleep(0.02)
    return [1 + sum(prefix) % 90 for prefix in prefixes]

def fatal(prefixes):
    if any(prefix[0] == 13 for prefix in prefixes):
        os.kill(os.getpid(), 9)
    return [1 + sum(prefix) % 90 for prefix in prefixes]

def hopeless(prefixes):
    os._exit(3)

def interrupting(prefixes):
    if any(prefix[0] == 13 for prefix in prefixes):
        raise KeyboardInterrupt
    return [1 + sum(prefix) % 90 for prefix in prefixes]
"""
