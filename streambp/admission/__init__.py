"""Who may stream: finds a model's layers, tries them, and says yes, whole, or no with a reason."""
