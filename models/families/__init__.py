"""One small file a family: how its config.json becomes a ModelConfig, how its weight names become ours."""
