"""What models think before they answer: how they mark it, and how it is told apart from the answer."""
