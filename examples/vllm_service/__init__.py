"""Example: replicas of vLLM's OpenAI server under Ray Serve, whose requests may have plans.

`python -m examples.vllm_service --model DIR --replicas 2 --enforce-eager`; see README.md.
"""
