"""The agent that runs inside an engine."""
