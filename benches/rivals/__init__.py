"""The wrong-answers suite: ways in which hooking gives wrong answers, for ferrohook and others.

`python -m benches.rivals SCENE SYSTEM` plays one scene with one system in this interpreter; it
needs that system, torch and transformers alone. `make rivals` plays all of them, each system in a
separate environment, and writes `docs/rivals.json` and the page.
"""
