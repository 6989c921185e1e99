// One tap's part of one row of HiddenStateExtract. Values are moved as bits: nothing overflows, NaNs stay what they
// are.
#pragma once

#include "kernels.h"
#include "team.cuh"

namespace dflow {

template <class Bits>
struct ExtractRow {
  Bits const* source;
  Bits* target;
  bool live;
};

// `row` counts over batch and rows together.
template <class Bits>
DFLOW_HD ExtractRow<Bits> extract_row(HiddenStateExtractArgs const& args, int64_t row, int32_t tap) {
  int64_t const request = row / args.rows;
  Bits const* const source = static_cast<Bits const*>(args.taps[tap]) + row * args.columns;
  Bits* const target = static_cast<Bits*>(args.hidden) + (row * args.num_taps + tap) * args.columns;
  return {source, target, row - request * args.rows < args.row_count[request]};
}

// A garbage row is selected away, never multiplied by zero: it may hold NaNs.
template <Access kAccess, class Bits>
DFLOW_HD void extract(Team team, ExtractRow<Bits> const& row, int32_t columns) {
  if (row.live) {
    copy_row<kAccess>(team, row.source, row.target, columns);
  } else {
    zero_row<kAccess>(team, row.target, columns);
  }
}

}  // namespace dflow
