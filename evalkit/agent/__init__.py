"""What runs inside every engine that evalkit starts: it pins the engine as one piece, fences it, stamps its answers.

vLLM loads both parts through its own extension points: `--middleware evalkit.agent.middleware.Agent` into the API
server, `--worker-extension-cls evalkit.agent.loader.Loader` into every rank. vLLM's development mode stays off.
"""
