"""Names of the files that trainings, exports and sweeps leave in their folders."""

BEST, LAST = "best.pt", "last.pt"
CONFIG, ENVIRONMENT, RESULT = "config.toml", "environment.json", "result.json"
METRICS, CURVES, VALIDATION = "metrics.jsonl", "curves.png", "validation.json"
MODEL, EMBEDDINGS = "model.onnx", "embeddings.h5"  # of an export into the folder
SWEEP, SWEEP_TABLE = "sweep.json", "sweep.csv"
