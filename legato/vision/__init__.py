"""Images in prompts: file formats, sizes, fetching, and how many tokens they take. Never imports torch."""
