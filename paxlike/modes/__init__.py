"""One module a mode: a plain function `mode(experiment, workdir) -> Report`."""
