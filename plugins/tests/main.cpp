#include "check.h"

int main() {
  return check::run();
}
