// Behind each other: each token's first column, its last; REPEATED times how many columns have settled, and where to write.
uint at = thread_position_in_grid.x, count = tokens, end = 2 * count;
int filled = before[0], standing = settled[0];
if (at < count) {
  placed[at] = PADDED ? padding[at / length] : 0;
} else if (at < end) {
  placed[at] = filled + 1 + static_cast<int>((at - count) % length);
} else if (at < end + 2 * REPEATED) {
  placed[at] = at < end + REPEATED ? standing : filled - standing;
}
