"""The pages: static files of the package, without a build step, that load nothing from other hosts."""
