from compile_here import *
for r, st, W, nreg in ((64,8,8,168),(64,4,4,128),(32,5,4,128),(128,3,4,128),(128,6,8,168)):
    compile_wide(6144,4096,r,st,2,False,32,W=W,nreg=nreg,early=W==4)
    compile_wide(4096,4096,r,st,0,True,0,W=W,nreg=nreg,early=W==4)
    compile_wide(28672,4096,r,st,1,False,32,W=W,nreg=nreg,early=W==4)
