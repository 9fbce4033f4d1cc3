"""An HTTP server over the scheduler, for teaching, probing and tests (pip install 'specsim[serve]')."""
