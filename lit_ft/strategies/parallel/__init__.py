"""Components of ``ModelParallelStrategy``: tensor, sequence, pipeline, context and expert parallelism."""
