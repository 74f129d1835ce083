"""Messages to prompt: chat templates, content parts, tools. Templates render in a confined process."""
