"""Everything about requests: HTTP, validation, text, and the scheduler that decides what runs. Never imports torch."""
