"""What people look at: tables for the terminal, pictures, pages, traces for viewers."""
