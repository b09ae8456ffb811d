"""HTML pages: reports, and the site of the leaderboard."""
