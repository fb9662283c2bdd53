"""All that the debug tools find out about two models in one document, the advice that follows from it, and its page."""
