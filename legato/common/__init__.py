"""Options, command lines, errors, logging, progress, sockets. Imports nothing else of Legato."""
