/* The system's permission to use AMX's tiles. Products with them are in x86_dots.c and x86_planes.c. */
#include "digits.h"

#if defined(X86_TILES)

#include <sys/syscall.h>
#include <unistd.h>

/* Linux keeps the 8 KB of tiles for threads of those processes alone that have asked for it. */
#define REQUEST_PERMISSION 0x1023
#define TILE_DATA 18

int prepare_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : -1; }

#else

int prepare_tiles(void) { return 0; }

#endif
